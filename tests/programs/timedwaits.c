/*
 * timedwaits MILLISECONDS ROUNDS [NAME...]: each blocking call of signal(7)'s lists waits in a thread of its own, again
 * and again, as event loops do. For each call a line: its name, the shortest and the longest wait in milliseconds, and how
 * many waits ended otherwise than expected. Waits without a timeout are ended by another thread after that time. Meanwhile
 * one more thread calls tick() every two milliseconds, whose first instruction is of the x87 unit: with a probe on it all
 * other threads are stopped each time. "skip NAME" is for a call that this kernel does not have.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/futex.h>
#include <linux/io_uring.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <pty.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

enum { MISSING = -1000 };

static int period;
static volatile int going;
static char directory[] = "/tmp/timedwaits.XXXXXX";

/* fld1 is stepped in place, because the unit keeps its address. */
void tick(void);
__asm__(".text\n.globl tick\n.type tick, @function\ntick: fld1\nfstp %st(0)\nret\n.size tick, . - tick");

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static struct timespec span(int ms)
{
	return (struct timespec){ ms / 1000, ms % 1000 * 1000000L };
}

static struct timespec later(clockid_t clock, int ms)
{
	struct timespec t;
	clock_gettime(clock, &t);
	t.tv_sec += ms / 1000;
	t.tv_nsec += ms % 1000 * 1000000L;
	if (t.tv_nsec >= 1000000000L)
		t.tv_sec++, t.tv_nsec -= 1000000000L;
	return t;
}

static void rest(int ms)
{
	struct timespec t = later(CLOCK_MONOTONIC, ms);
	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL))
		;
}

static int error_is(long result, int expected)
{
	if (result == -1 && errno == ENOSYS)
		return MISSING;
	return result == -1 && errno == expected ? 0 : 1;
}

/* Somebody who ends a wait after the period. */
struct waker {
	void (*wake)(struct waker *);
	int file;
	pthread_t thread, waiting;
	void *where;
};

static void *waking(void *arg)
{
	struct waker *waker = arg;
	rest(period);
	waker->wake(waker);
	return NULL;
}

static void begin(struct waker *waker, void (*wake)(struct waker *), int file)
{
	waker->wake = wake;
	waker->file = file;
	waker->waiting = pthread_self();
	pthread_create(&waker->thread, NULL, waking, waker);
}

static int end(struct waker *waker, int failed)
{
	int error = errno;
	pthread_join(waker->thread, NULL);
	errno = error;
	return failed;
}

static void by_write(struct waker *w) { if (write(w->file, "12345678", 8) != 8) abort(); }
static void by_count(struct waker *w) { uint64_t one = 1; if (write(w->file, &one, 8) != 8) abort(); }
static void by_close(struct waker *w) { close(w->file); }
static void by_signal(struct waker *w) { pthread_kill(w->waiting, SIGUSR2); }
static void by_queued(struct waker *w) { pthread_kill(w->waiting, SIGUSR1); }
static void by_unlock(struct waker *w) { flock(w->file, LOCK_UN); }

static void by_unlock_record(struct waker *w)
{
	struct flock lock = { .l_type = F_UNLCK };
	fcntl(w->file, F_OFD_SETLK, &lock);
}

static void by_read(struct waker *w)
{
	static char bytes[1 << 20];
	fcntl(w->file, F_SETFL, O_NONBLOCK);
	while (read(w->file, bytes, sizeof bytes) > 0)
		;
}

static void by_accept(struct waker *w) { close(accept(w->file, NULL, NULL)); }
static void by_msgsnd(struct waker *w) { struct { long type; char text; } m = { 1, 0 }; msgsnd(w->file, &m, 1, 0); }
static void by_msgrcv(struct waker *w) { char m[8200]; msgrcv(w->file, m, 8192, 0, 0); }
static void by_semop(struct waker *w) { struct sembuf up = { 0, 1, 0 }; semop(w->file, &up, 1); }
static void by_mq_send(struct waker *w) { mq_send(w->file, "x", 1, 0); }
static void by_mq_receive(struct waker *w) { char text[16]; mq_receive(w->file, text, sizeof text, NULL); }

static void by_futex(struct waker *w)
{
	*(int *)w->where = 1;
	syscall(SYS_futex, w->where, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void by_connect(struct waker *w)
{
	int file = socket(AF_UNIX, SOCK_STREAM, 0);
	if (connect(file, w->where, sizeof(struct sockaddr_un)))
		abort();
	close(file);
}

static void by_open(struct waker *w) { close(open(w->where, O_WRONLY)); }
static void by_create(struct waker *w) { close(open(w->where, O_CREAT | O_WRONLY, 0600)); }

/* Multiplexing */

static int in_epoll_wait(void)
{
	struct epoll_event event;
	int file = epoll_create1(0), failed = epoll_wait(file, &event, 1, period);
	return close(file), failed;
}

static int in_epoll_pwait(void)
{
	struct epoll_event event;
	sigset_t set;
	sigemptyset(&set);
	int file = epoll_create1(0), failed = epoll_pwait(file, &event, 1, period, &set);
	return close(file), failed;
}

static int in_epoll_pwait2(void)
{
#ifdef SYS_epoll_pwait2
	struct epoll_event event;
	long long limit[2] = { period / 1000, period % 1000 * 1000000LL };
	int file = epoll_create1(0);
	long failed = syscall(SYS_epoll_pwait2, file, &event, 1, limit, NULL, 0);
	close(file);
	return failed == -1 && errno == ENOSYS ? MISSING : failed;
#else
	return MISSING;
#endif
}

static int in_epoll_forever(void)
{
	struct waker waker;
	int file = epoll_create1(0), woken = eventfd(0, 0);
	struct epoll_event event = { .events = EPOLLIN };
	epoll_ctl(file, EPOLL_CTL_ADD, woken, &event);
	begin(&waker, by_count, woken);
	int failed = end(&waker, epoll_wait(file, &event, 1, -1) != 1);
	return close(file), close(woken), failed;
}

static int in_poll(void) { return poll(NULL, 0, period); }

static int in_poll_forever(void)
{
	struct waker waker;
	struct pollfd entry = { eventfd(0, 0), POLLIN, 0 };
	begin(&waker, by_count, entry.fd);
	int failed = end(&waker, poll(&entry, 1, -1) != 1);
	return close(entry.fd), failed;
}

static int in_ppoll(void)
{
	struct timespec limit = span(period);
	return ppoll(NULL, 0, &limit, NULL);
}

static int in_select(void)
{
	struct timeval limit = { period / 1000, period % 1000 * 1000 };
	return select(0, NULL, NULL, NULL, &limit);
}

static int in_pselect(void)
{
	struct timespec limit = span(period);
	return pselect(0, NULL, NULL, NULL, &limit, NULL);
}

static int in_select_forever(void)
{
	struct waker waker;
	int file = eventfd(0, 0);
	fd_set set;
	FD_ZERO(&set);
	FD_SET(file, &set);
	begin(&waker, by_count, file);
	int failed = end(&waker, select(file + 1, &set, NULL, NULL, NULL) != 1);
	return close(file), failed;
}

/* The kernel cannot say there how much is left, and so does not restart these by itself. */
static long *constant_limit(void)
{
	long *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	page[0] = period / 1000;
	page[1] = period % 1000 * 1000000L;
	mprotect(page, 4096, PROT_READ);
	return page;
}

static int in_constant_pselect(void)
{
	long *limit = constant_limit(), failed;
	int file = eventfd(0, 0);
	fd_set set;
	FD_ZERO(&set);
	FD_SET(file, &set);
	failed = syscall(SYS_pselect6, file + 1, &set, NULL, NULL, limit, NULL) || FD_ISSET(file, &set);
	close(file);
	munmap(limit, 4096);
	return failed;
}

static int in_constant_ppoll(void)
{
	long *limit = constant_limit();
	int failed = syscall(SYS_ppoll, NULL, 0, limit, NULL, 0);
	munmap(limit, 4096);
	return failed;
}

/* Sockets */

static void limit_socket(int file, int option)
{
	struct timeval limit = { period / 1000, period % 1000 * 1000 };
	setsockopt(file, SOL_SOCKET, option, &limit, sizeof limit);
}

static int on_socket(int kind, int limited)
{
	int pair[2], failed = 1;
	char bytes[8];
	struct iovec vector = { bytes, 8 };
	struct msghdr header = { .msg_iov = &vector, .msg_iovlen = 1 };
	struct mmsghdr headers[2] = { { .msg_hdr = header }, { .msg_hdr = header } };
	struct waker waker;
	long result;

	socketpair(AF_UNIX, kind == 4 ? SOCK_DGRAM : SOCK_STREAM, 0, pair);
	if (limited)
		limit_socket(pair[0], SO_RCVTIMEO);
	else
		begin(&waker, by_write, pair[1]);
	switch (kind) {
	case 0: result = recv(pair[0], bytes, 8, 0); break;
	case 1: result = read(pair[0], bytes, 8); break;
	case 2: result = readv(pair[0], &vector, 1); break;
	case 3: result = recvmsg(pair[0], &header, 0); break;
	case 4: result = recvmmsg(pair[0], headers, limited ? 2 : 1, 0, NULL) * (limited ? 1 : 8); break;
#ifdef __i386__
	case 5: {
		unsigned long arguments[4] = { pair[0], (unsigned long)bytes, 8, 0 };
		result = syscall(SYS_socketcall, 10, arguments);
		break;
	}
#endif
	default: result = -1;
	}
	failed = limited ? error_is(result, EAGAIN) : end(&waker, result != 8);
	close(pair[0]);
	close(pair[1]);
	return failed;
}

static int in_recv(void) { return on_socket(0, 1); }
static int in_recv_forever(void) { return on_socket(0, 0); }
static int in_socket_read(void) { return on_socket(1, 1); }
static int in_socket_readv(void) { return on_socket(2, 1); }
static int in_recvmsg(void) { return on_socket(3, 1); }
static int in_recvmsg_forever(void) { return on_socket(3, 0); }
static int in_recvmmsg(void) { return on_socket(4, 1); }
static int in_recvmmsg_forever(void) { return on_socket(4, 0); }
#ifdef __i386__
static int in_socketcall(void) { return on_socket(5, 1); }
#endif

static int sending(int with_write, int limited)
{
	static char bytes[1 << 18];
	int pair[2], failed;
	long result;
	struct waker waker;

	socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
	while (send(pair[0], bytes, sizeof bytes, MSG_DONTWAIT) > 0)
		;
	if (limited)
		limit_socket(pair[0], SO_SNDTIMEO);
	else
		begin(&waker, by_read, pair[1]);
	result = with_write ? write(pair[0], bytes, 1) : send(pair[0], bytes, 1, 0);
	failed = limited ? error_is(result, EAGAIN) : end(&waker, result != 1);
	close(pair[0]);
	close(pair[1]);
	return failed;
}

static int in_send(void) { return sending(0, 1); }
static int in_send_forever(void) { return sending(0, 0); }
static int in_socket_write(void) { return sending(1, 1); }

static int listener(struct sockaddr_un *name, int backlog)
{
	int file = socket(AF_UNIX, SOCK_STREAM, 0);
	static int number;
	*name = (struct sockaddr_un){ .sun_family = AF_UNIX };
	snprintf(name->sun_path + 1, 90, "%s.%d", directory, __sync_fetch_and_add(&number, 1));
	if (bind(file, (struct sockaddr *)name, sizeof *name) || listen(file, backlog))
		abort();
	return file;
}

static int accepting(int limited)
{
	struct sockaddr_un name;
	struct waker waker;
	int file = listener(&name, 1), result, failed;
	waker.where = &name;
	if (limited)
		limit_socket(file, SO_RCVTIMEO);
	else
		begin(&waker, by_connect, file);
	result = accept(file, NULL, NULL);
	failed = limited ? error_is(result, EAGAIN) : end(&waker, result < 0);
	if (result >= 0)
		close(result);
	close(file);
	return failed;
}

static int in_accept(void) { return accepting(1); }
static int in_accept_forever(void) { return accepting(0); }

static int connecting(int limited)
{
	struct sockaddr_un name;
	struct waker waker;
	int file = listener(&name, 0), first = socket(AF_UNIX, SOCK_STREAM, 0), second = socket(AF_UNIX, SOCK_STREAM, 0);
	int result, failed;
	if (connect(first, (struct sockaddr *)&name, sizeof name))
		abort();
	if (limited)
		limit_socket(second, SO_SNDTIMEO);
	else
		begin(&waker, by_accept, file);
	result = connect(second, (struct sockaddr *)&name, sizeof name);
	failed = limited ? error_is(result, EAGAIN) : end(&waker, result);
	return close(first), close(second), close(file), failed;
}

static int in_connect(void) { return connecting(1); }
static int in_connect_forever(void) { return connecting(0); }

/* Nobody answers where the queue of connections is full. */
static int in_tcp_connect(void)
{
	struct sockaddr_in name = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t size = sizeof name;
	int file = socket(AF_INET, SOCK_STREAM, 0), first[8], last = socket(AF_INET, SOCK_STREAM, 0), failed;
	if (bind(file, (struct sockaddr *)&name, sizeof name) || listen(file, 0))
		return MISSING;
	getsockname(file, (struct sockaddr *)&name, &size);
	for (int n = 0; n < 8; n++) {
		first[n] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
		connect(first[n], (struct sockaddr *)&name, sizeof name);
	}
	limit_socket(last, SO_SNDTIMEO);
	failed = error_is(connect(last, (struct sockaddr *)&name, sizeof name), EINPROGRESS);
	for (int n = 0; n < 8; n++)
		close(first[n]);
	return close(last), close(file), failed;
}

/* Signals */

static int in_sigtimedwait(void)
{
	struct timespec limit = span(period);
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	return error_is(sigtimedwait(&set, NULL, &limit), EAGAIN);
}

static int in_sigwaitinfo(void)
{
	struct waker waker;
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	begin(&waker, by_queued, 0);
	return end(&waker, sigwaitinfo(&set, NULL) != SIGUSR1);
}

static void nothing(int number) { (void)number; }

static int in_pause(void)
{
	struct waker waker;
	begin(&waker, by_signal, 0);
	return end(&waker, error_is(pause(), EINTR));
}

static int in_sigsuspend(void)
{
	struct waker waker;
	sigset_t set;
	sigfillset(&set);
	sigdelset(&set, SIGUSR2);
	begin(&waker, by_signal, 0);
	return end(&waker, error_is(sigsuspend(&set), EINTR));
}

/* A signal with a handler still ends a wait; and so it does one that stops have interrupted before. */
static int in_interrupted_epoll(void)
{
	struct waker waker;
	struct epoll_event event;
	int file = epoll_create1(0), failed;
	begin(&waker, by_signal, 0);
	failed = end(&waker, error_is(epoll_wait(file, &event, 1, 20 * period), EINTR));
	return close(file), failed;
}

/* Semaphores, messages, asynchronous input and output */

static int with_semaphore(int kind)
{
	struct sembuf down = { 0, -1, 0 };
	struct timespec limit = span(period);
	struct waker waker;
	int id = semget(IPC_PRIVATE, 1, 0600), failed = 1;
	if (kind == 0) {
		failed = error_is(semtimedop(id, &down, 1, &limit), EAGAIN);
	} else if (kind == 1) {
		begin(&waker, by_semop, id);
		failed = end(&waker, semop(id, &down, 1));
	}
#ifdef __i386__
	if (kind == 2) {
		long old[2] = { limit.tv_sec, limit.tv_nsec };
		failed = error_is(syscall(SYS_ipc, 4, id, 1, 0, &down, old), EAGAIN);
	}
#endif
	semctl(id, 0, IPC_RMID);
	return failed;
}

static int in_semtimedop(void) { return with_semaphore(0); }
static int in_semop(void) { return with_semaphore(1); }
#ifdef __i386__
static int in_ipc(void) { return with_semaphore(2); }
#endif

static int in_msgrcv(void)
{
	struct waker waker;
	char m[64];
	int id = msgget(IPC_PRIVATE, 0600), failed;
	begin(&waker, by_msgsnd, id);
	failed = end(&waker, msgrcv(id, m, 32, 0, 0) != 1);
	return msgctl(id, IPC_RMID, NULL), failed;
}

static int in_msgsnd(void)
{
	struct waker waker;
	struct { long type; char text[8192]; } m = { 1, "" };
	int id = msgget(IPC_PRIVATE, 0600), failed;
	while (!msgsnd(id, &m, sizeof m.text, IPC_NOWAIT))
		;
	begin(&waker, by_msgrcv, id);
	failed = end(&waker, msgsnd(id, &m, sizeof m.text, 0));
	return msgctl(id, IPC_RMID, NULL), failed;
}

static mqd_t queue(void)
{
	static int number;
	char name[64];
	struct mq_attr shape = { .mq_maxmsg = 1, .mq_msgsize = 16 };
	snprintf(name, sizeof name, "/timedwaits.%d.%d", getpid(), __sync_fetch_and_add(&number, 1));
	mqd_t id = mq_open(name, O_RDWR | O_CREAT, 0600, &shape);
	mq_unlink(name);
	return id;
}

static int in_mq_timedreceive(void)
{
	char text[16];
	struct timespec limit = later(CLOCK_REALTIME, period);
	mqd_t id = queue();
	int failed = error_is(mq_timedreceive(id, text, sizeof text, NULL, &limit), ETIMEDOUT);
	return mq_close(id), failed;
}

static int in_mq_timedsend(void)
{
	struct timespec limit = later(CLOCK_REALTIME, period);
	mqd_t id = queue();
	mq_send(id, "x", 1, 0);
	int failed = error_is(mq_timedsend(id, "y", 1, 0, &limit), ETIMEDOUT);
	return mq_close(id), failed;
}

static int in_mq_receive(void)
{
	struct waker waker;
	char text[16];
	mqd_t id = queue();
	begin(&waker, by_mq_send, id);
	int failed = end(&waker, mq_receive(id, text, sizeof text, NULL) != 1);
	return mq_close(id), failed;
}

static int in_mq_send(void)
{
	struct waker waker;
	mqd_t id = queue();
	mq_send(id, "x", 1, 0);
	begin(&waker, by_mq_receive, id);
	int failed = end(&waker, mq_send(id, "y", 1, 0));
	return mq_close(id), failed;
}

static int getting_events(long number)
{
	aio_context_t context = 0;
	struct io_event event;
	struct timespec limit = span(period);
	long old[2] = { limit.tv_sec, limit.tv_nsec };
	if (syscall(SYS_io_setup, 1, &context))
		return MISSING;
	long failed = syscall(number, context, 1L, 1L, &event, old, NULL);
	if (failed == -1 && errno == ENOSYS)
		failed = MISSING;
	syscall(SYS_io_destroy, context);
	return failed;
}

static int in_io_getevents(void) { return getting_events(SYS_io_getevents); }
static int in_io_pgetevents(void) { return getting_events(SYS_io_pgetevents); }

static int in_io_uring(void)
{
	struct io_uring_params parameters = { 0 };
	struct timespec limit = span(period);
	long long time[2] = { limit.tv_sec, limit.tv_nsec };
	struct io_uring_getevents_arg argument = { .ts = (uintptr_t)time };
	int file = syscall(SYS_io_uring_setup, 2, &parameters), failed;
	if (file < 0 || !(parameters.features & IORING_FEAT_EXT_ARG))
		return MISSING;
	failed = error_is(
		syscall(SYS_io_uring_enter, file, 0, 1, IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &argument, sizeof argument),
		ETIME);
	return close(file), failed;
}

/* Locks, sleeping, files */

static int in_futex(void)
{
	int word = 0;
	struct timespec limit = span(period);
	long old[2] = { limit.tv_sec, limit.tv_nsec };
	return error_is(syscall(SYS_futex, &word, FUTEX_WAIT, 0, old, NULL, 0), ETIMEDOUT);
}

static int in_futex_forever(void)
{
	struct waker waker;
	int word = 0;
	waker.where = &word;
	begin(&waker, by_futex, 0);
	while (!syscall(SYS_futex, &word, FUTEX_WAIT, 0, NULL, NULL, 0) && !word)
		;
	return end(&waker, !word);
}

static int in_sem_timedwait(void)
{
	sem_t semaphore;
	struct timespec limit = later(CLOCK_REALTIME, period);
	sem_init(&semaphore, 0, 0);
	return error_is(sem_timedwait(&semaphore, &limit), ETIMEDOUT);
}

static int in_cond_timedwait(void)
{
	pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
	pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
	struct timespec limit = later(CLOCK_REALTIME, period);
	int error;
	pthread_mutex_lock(&mutex);
	error = pthread_cond_timedwait(&condition, &mutex, &limit);
	pthread_mutex_unlock(&mutex);
	return error != ETIMEDOUT;
}

static int in_nanosleep(void)
{
	struct timespec time = span(period);
	return nanosleep(&time, NULL);
}

static int in_clock_nanosleep(void)
{
	struct timespec time = later(CLOCK_MONOTONIC, period);
	return clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL);
}

static int in_flock(void)
{
	struct waker waker;
	char path[64];
	snprintf(path, sizeof path, "%s/flock", directory);
	int holder = open(path, O_CREAT | O_RDWR, 0600), file = open(path, O_RDWR), failed;
	flock(holder, LOCK_EX);
	begin(&waker, by_unlock, holder);
	failed = end(&waker, flock(file, LOCK_EX));
	return close(holder), close(file), failed;
}

static int in_fcntl(void)
{
	struct waker waker;
	struct flock lock = { .l_type = F_WRLCK };
	char path[64];
	snprintf(path, sizeof path, "%s/fcntl", directory);
	int holder = open(path, O_CREAT | O_RDWR, 0600), file = open(path, O_RDWR), failed;
	fcntl(holder, F_OFD_SETLK, &lock);
	begin(&waker, by_unlock_record, holder);
	failed = end(&waker, fcntl(file, F_OFD_SETLKW, &lock));
	return close(holder), close(file), failed;
}

static int in_wait(void)
{
	int pair[2], status;
	struct waker waker;
	if (pipe2(pair, O_CLOEXEC))
		abort();
	pid_t child = fork();
	if (child == 0) {
		char byte;
		close(pair[1]);
		_exit(read(pair[0], &byte, 1) ? 1 : 7);
	}
	close(pair[0]);
	begin(&waker, by_close, pair[1]);
	return end(&waker, waitpid(child, &status, 0) != child);
}

static int in_pipe_read(void)
{
	struct waker waker;
	char bytes[8];
	int pair[2], failed;
	if (pipe2(pair, O_CLOEXEC))
		abort();
	begin(&waker, by_write, pair[1]);
	failed = end(&waker, read(pair[0], bytes, 8) != 8);
	return close(pair[0]), close(pair[1]), failed;
}

static int in_pipe_write(void)
{
	static char bytes[1 << 16];
	struct waker waker;
	int pair[2], failed;
	if (pipe2(pair, O_CLOEXEC))
		abort();
	fcntl(pair[1], F_SETFL, O_NONBLOCK);
	while (write(pair[1], bytes, sizeof bytes) > 0)
		;
	fcntl(pair[1], F_SETFL, 0);
	begin(&waker, by_read, pair[0]);
	failed = end(&waker, write(pair[1], bytes, 8) != 8);
	return close(pair[0]), close(pair[1]), failed;
}

static int in_fifo_open(void)
{
	struct waker waker;
	char path[64];
	snprintf(path, sizeof path, "%s/fifo", directory);
	mkfifo(path, 0600);
	waker.where = path;
	begin(&waker, by_open, 0);
	int file = open(path, O_RDONLY);
	end(&waker, 0);
	return close(file);
}

static int in_inotify_read(void)
{
	struct waker waker;
	char path[64], bytes[4096];
	static int number;
	int file = inotify_init(), failed;
	snprintf(path, sizeof path, "%s/new", directory);
	mkdir(path, 0700);
	inotify_add_watch(file, path, IN_CREATE);
	snprintf(path, sizeof path, "%s/new/%d", directory, number++);
	waker.where = path;
	begin(&waker, by_create, 0);
	failed = end(&waker, read(file, bytes, sizeof bytes) <= 0);
	return close(file), unlink(path), failed;
}

static int in_eventfd_read(void)
{
	struct waker waker;
	uint64_t count;
	int file = eventfd(0, 0), failed;
	begin(&waker, by_count, file);
	failed = end(&waker, read(file, &count, 8) != 8);
	return close(file), failed;
}

static int in_timerfd_read(void)
{
	struct itimerspec time = { .it_value = span(period) };
	uint64_t count;
	int file = timerfd_create(CLOCK_MONOTONIC, 0), failed;
	timerfd_settime(file, 0, &time, NULL);
	failed = read(file, &count, 8) != 8;
	return close(file), failed;
}

static int in_terminal_read(void)
{
	struct termios raw;
	char byte;
	int ours, theirs, failed;
	if (openpty(&ours, &theirs, NULL, NULL, NULL))
		return MISSING;
	tcgetattr(theirs, &raw);
	cfmakeraw(&raw);
	raw.c_cc[VMIN] = 0;
	raw.c_cc[VTIME] = (period + 99) / 100;
	tcsetattr(theirs, TCSANOW, &raw);
	failed = read(theirs, &byte, 1) != 0;
	return close(ours), close(theirs), failed;
}

#ifdef __x86_64__
/* epoll_wait by its i386 number. */
static int in_int80(void)
{
	struct epoll_event *event = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
	int file = epoll_create1(0);
	long result = 256;
	__asm__ volatile("int $0x80" : "+a"(result) : "b"(file), "c"(event), "d"(1), "S"(period) : "memory", "r8", "r9", "r10", "r11");
	close(file);
	munmap(event, 4096);
	return result == -ENOSYS ? MISSING : result;
}
#endif

#define CALL(name) { #name, in_##name }
static struct call {
	const char *name;
	int (*wait)(void);
	double shortest, longest;
	int failed, missing, rounds, chosen;
	pthread_t thread;
} calls[] = {
	CALL(epoll_wait), CALL(epoll_pwait), CALL(epoll_pwait2), CALL(epoll_forever), CALL(poll), CALL(poll_forever), CALL(ppoll),
	CALL(select), CALL(pselect), CALL(select_forever), CALL(constant_pselect), CALL(constant_ppoll), CALL(recv),
	CALL(recv_forever), CALL(socket_read), CALL(socket_readv), CALL(recvmsg), CALL(recvmsg_forever), CALL(recvmmsg),
	CALL(recvmmsg_forever), CALL(send), CALL(send_forever), CALL(socket_write), CALL(accept), CALL(accept_forever),
	CALL(connect), CALL(connect_forever), CALL(tcp_connect), CALL(sigtimedwait), CALL(sigwaitinfo), CALL(pause),
	CALL(sigsuspend), CALL(interrupted_epoll), CALL(semtimedop), CALL(semop), CALL(msgrcv), CALL(msgsnd),
	CALL(mq_timedreceive), CALL(mq_timedsend), CALL(mq_receive), CALL(mq_send), CALL(io_getevents), CALL(io_pgetevents),
	CALL(io_uring), CALL(futex), CALL(futex_forever), CALL(sem_timedwait), CALL(cond_timedwait), CALL(nanosleep),
	CALL(clock_nanosleep), CALL(flock), CALL(fcntl), CALL(wait), CALL(pipe_read), CALL(pipe_write), CALL(fifo_open),
	CALL(inotify_read), CALL(eventfd_read), CALL(timerfd_read), CALL(terminal_read),
#ifdef __x86_64__
	CALL(int80),
#else
	CALL(socketcall), CALL(ipc),
#endif
};
enum { CALLS = sizeof calls / sizeof *calls };

static void *loop(void *arg)
{
	struct call *call = arg;
	call->shortest = 1e9;
	for (int n = 0; n < call->rounds; n++) {
		double start = now();
		int failed = call->wait();
		double time = now() - start;
		if (failed == MISSING) {
			call->missing = 1;
			break;
		}
		call->failed += failed != 0;
		if (time < call->shortest)
			call->shortest = time;
		if (time > call->longest)
			call->longest = time;
	}
	__sync_fetch_and_sub(&going, 1);
	return NULL;
}

int main(int count, char **arguments)
{
	sigset_t set;
	struct sigaction action = { .sa_handler = nothing };
	char command[64];

	period = atoi(arguments[1]);
	if (!mkdtemp(directory))
		return 20;
	sigaction(SIGUSR2, &action, NULL);
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigprocmask(SIG_BLOCK, &set, NULL);
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (int n = 0; n < CALLS; n++) {
		calls[n].chosen = count == 3;
		for (int a = 3; a < count; a++)
			calls[n].chosen |= !strcmp(arguments[a], calls[n].name);
		calls[n].rounds = atoi(arguments[2]);
		going += calls[n].chosen;
	}
	puts("waiting");
	for (int n = 0; n < CALLS; n++)
		if (calls[n].chosen)
			pthread_create(&calls[n].thread, NULL, loop, &calls[n]);
	for (int turn = 0; going; turn++) {
		tick();
		rest(2);
		for (int n = 0; n < CALLS && turn % 16 == 15; n++)
			if (calls[n].chosen)
				pthread_kill(calls[n].thread, SIGWINCH);
	}
	for (int n = 0; n < CALLS; n++) {
		if (!calls[n].chosen)
			continue;
		pthread_join(calls[n].thread, NULL);
		if (calls[n].missing)
			printf("skip %s\n", calls[n].name);
		else
			printf("%s %.0f %.0f %d\n", calls[n].name, calls[n].shortest, calls[n].longest, calls[n].failed);
	}
	snprintf(command, sizeof command, "rm -r %s", directory);
	return system(command) != 0;
}
