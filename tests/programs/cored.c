/*
 * cored COUNT: calls measure so often while another thread waits. What it is given lies on the stack, in the heap, in
 * variables and in floating-point registers.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct note {
	long number;
	char text[24];
};

double total;
static pthread_mutex_t held = PTHREAD_MUTEX_INITIALIZER;
static pthread_barrier_t start;

__attribute__((noinline)) double measure(struct note *note, const char *word, double weight, int n)
{
	total += weight * n + note->number + word[0];
	return total;
}

__attribute__((noinline)) static int waiter(int number)
{
	pthread_barrier_wait(&start); /* whoever is past it finds a thread in this function */
	pthread_mutex_lock(&held);
	pthread_mutex_unlock(&held);
	return number + 1;
}

static void *run(void *argument)
{
	return (void *)(long)waiter(*(int *)argument);
}

int main(int argc, char **argv)
{
	struct note *note = malloc(sizeof *note);
	char word[] = "on the stack";
	int number = 41, count = argc > 1 ? atoi(argv[1]) : 4;
	pthread_t other;

	note->number = 1000;
	strcpy(note->text, "in the heap");
	pthread_mutex_lock(&held);
	pthread_barrier_init(&start, NULL, 2);
	pthread_create(&other, NULL, run, &number);
	pthread_barrier_wait(&start);
	for (int n = 0; n < count; n++)
		measure(note, word, n + 0.25, n);
	pthread_mutex_unlock(&held);
	pthread_join(other, NULL);
	printf("%.2f\n", total);
	return 0;
}
