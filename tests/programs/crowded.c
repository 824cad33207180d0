/* Maps a page at each address that it reads, in hexadecimal digits, and says so; another thread calls busy() meanwhile. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>

static volatile unsigned long calls;

__attribute__((noinline, noclone)) unsigned long busy(unsigned long n)
{
	calls = n;
	return n + 1;
}

static void *call(void *unused)
{
	for (unsigned long n = 0;; n = busy(n))
		;
	return unused;
}

int main(void)
{
	pthread_t thread;
	unsigned long address;
	pthread_create(&thread, NULL, call, NULL);
	printf("ready\n");
	fflush(stdout);
	while (scanf("%lx", &address) == 1) {
		void *place = mmap((void *)address, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
		printf("%s\n", place == MAP_FAILED ? "failed" : "mapped");
		fflush(stdout);
	}
	return 0;
}
