/*
 * waiting: threads wait in calls that fail with EINTR when they are stopped, while another one calls tick() 200 times.
 * Status 0 if none of them was interrupted: each waits until the end, or for its timeout.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int pipes[2], sockets[2], epoll, semaphores;
static volatile unsigned long sum;
static volatile int failed;

__attribute__((noinline, noclone)) unsigned long tick(unsigned long n)
{
	sum += n;
	return n + 1;
}

/* read(2) by a system call instruction of our own, at a label. */
long read_byte(int file, char *to);
__asm__(".globl read_byte\n.type read_byte, @function\nread_byte: xor %eax, %eax\nmov $1, %edx\n"
	".globl site_read\n.type site_read, @function\nsite_read: syscall\nret\n.size read_byte, . - read_byte\n"
	".size site_read, . - site_read");

static void fail(int number)
{
	failed = number;
}

static void *in_epoll(void *arg)
{
	struct epoll_event event;
	if (epoll_wait(epoll, &event, 1, -1) != 1)
		fail(1);
	return arg;
}

static void *in_timed_epoll(void *arg)
{
	struct epoll_event event;
	int empty = epoll_create1(0);
	if (epoll_wait(empty, &event, 1, 100) != 0)
		fail(2);
	return arg;
}

static void *in_recv(void *arg)
{
	struct timeval limit = { 20, 0 };
	char byte;
	setsockopt(sockets[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
	if (recv(sockets[0], &byte, 1, 0) != 1)
		fail(3);
	return arg;
}

static void *in_semop(void *arg)
{
	struct sembuf down = { 0, -1, 0 };
	struct timespec limit = { 20, 0 };
	if (semtimedop(semaphores, &down, 1, &limit))
		fail(4);
	return arg;
}

static void *in_sigwait(void *arg)
{
	struct timespec limit = { 20, 0 };
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	if (sigtimedwait(&set, NULL, &limit) != SIGUSR1)
		fail(5);
	return arg;
}

static void *in_read(void *arg)
{
	char byte;
	if (read_byte(pipes[0], &byte) != 1)
		fail(6);
	return arg;
}

static void *in_sleep(void *arg)
{
	struct timespec time = { 0, 150000000 };
	if (nanosleep(&time, NULL))
		fail(7);
	return arg;
}

int main(void)
{
	void *(*waits[])(void *) = { in_epoll, in_timed_epoll, in_recv, in_semop, in_sigwait, in_read, in_sleep };
	enum { COUNT = sizeof waits / sizeof *waits };
	pthread_t ids[COUNT];
	struct epoll_event event = { .events = EPOLLIN };
	struct sembuf up = { 0, 1, 0 };
	struct timespec pause = { 0, 1000000 };
	sigset_t set;
	int data[2];

	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigprocmask(SIG_BLOCK, &set, NULL);
	semaphores = semget(IPC_PRIVATE, 1, 0600);
	epoll = epoll_create1(0);
	if (pipe(pipes) || pipe(data) || socketpair(AF_UNIX, SOCK_STREAM, 0, sockets))
		return 20;
	epoll_ctl(epoll, EPOLL_CTL_ADD, data[0], &event);
	for (int n = 0; n < COUNT; n++)
		pthread_create(&ids[n], NULL, waits[n], NULL);
	for (int n = 0; n < 200; n++) {
		tick(n);
		nanosleep(&pause, NULL);
	}
	if (write(data[1], "x", 1) != 1 || write(sockets[1], "x", 1) != 1 || write(pipes[1], "x", 1) != 1)
		return 21;
	semop(semaphores, &up, 1);
	kill(getpid(), SIGUSR1);
	for (int n = 0; n < COUNT; n++)
		pthread_join(ids[n], NULL);
	semctl(semaphores, 0, IPC_RMID);
	return failed;
}
