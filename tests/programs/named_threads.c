/* 200 threads, one after the other: each gives itself two names, t<n> and u<n>, and hits with its number after either. */
#include <pthread.h>
#include <stdio.h>
#include <sys/prctl.h>

__attribute__((noinline)) void tick(long number)
{
	__asm__ volatile("" : : "r"(number));
}

static void *run(void *argument)
{
	char name[16];

	for (const char *letter = "tu"; *letter; letter++) {
		snprintf(name, sizeof(name), "%c%ld", *letter, (long)argument);
		prctl(PR_SET_NAME, name);
		tick((long)argument);
	}
	return NULL;
}

int main(void)
{
	for (long number = 0; number < 200; number++) {
		pthread_t thread;

		pthread_create(&thread, NULL, run, (void *)number);
		pthread_join(thread, NULL);
	}
	return 0;
}
