/*
 * Call here() from many depths, callbacks and signal handlers, and print the return addresses that libgcc finds.
 * With an argument, wait for a line of input at the end.
 */
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((noinline)) void here(int depth)
{
    void *frames[128];
    int count = backtrace(frames, 128);
    printf("%d", depth);
    for (int n = 1; n < count; n++)
        printf(" %p", frames[n]);
    printf("\n");
}

__attribute__((noinline)) static int down(int depth)
{
    volatile char room[100];
    room[depth] = depth;
    if (depth == 0)
        here(room[0]);
    else
        down(depth - 1);
    return room[depth];
}

static int compare(const void *left, const void *right)
{
    here(-1);
    return *(const int *)left - *(const int *)right;
}

static void handle(int number)
{
    down(number % 7);
}

static void *work(void *depth)
{
    pthread_mutex_lock(&lock);
    down(*(int *)depth);
    pthread_mutex_unlock(&lock);
    return NULL;
}

int main(int argc, char **argv)
{
    int numbers[5] = {3, 1, 2, 5, 4};
    int depth = 9;
    pthread_t thread;
    stack_t other = {.ss_sp = malloc(65536), .ss_size = 65536};
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_ONSTACK};

    setvbuf(stdout, NULL, _IOFBF, 1 << 20);
    sigaltstack(&other, NULL);
    signal(SIGUSR1, handle);
    sigaction(SIGUSR2, &action, NULL);
    for (int n = 0; n < 60; n++)
        down(n);
    qsort(numbers, 5, sizeof(*numbers), compare);
    raise(SIGUSR1);
    raise(SIGUSR2);
    pthread_create(&thread, NULL, work, &depth);
    pthread_join(thread, NULL);
    fflush(stdout);
    if (argc > 1)
        getchar();
    return 0;
}
