/*
 * Calls event() with numbers and names, from several threads, and prints what a table of them must hold.
 *
 *     tallied COUNT THREADS        lines: "NAME COUNT SUM LEAST LARGEST", and "bucket POWER COUNT" of all numbers
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAMES 5
static const char *const names[NAMES] = {"alpha", "beta", "gamma", "delta", "a name that is longer than others"};

struct totals {
	long count[NAMES], sum[NAMES], least[NAMES], largest[NAMES], buckets[64];
};

static long per_thread;

__attribute__((noinline, noclone)) long event(long number, const char *name)
{
	__asm__ volatile("" : : "r"(number), "r"(name) : "memory");
	return number;
}

static void *work(void *argument)
{
	struct totals *totals = argument;
	unsigned long state = (unsigned long)totals->count[0] * 2654435761u + 12345;
	memset(totals, 0, sizeof *totals);
	for (long n = 0; n < per_thread; n++) {
		state = state * 6364136223846793005u + 1442695040888963407u;
		long which = (state >> 40) % NAMES;
		long number = (long)(state >> 33) >> (state >> 59);
		if (which == 1)
			number = -number;
		event(number, names[which]);
		if (!totals->count[which] || number < totals->least[which])
			totals->least[which] = number;
		if (!totals->count[which] || number > totals->largest[which])
			totals->largest[which] = number;
		totals->count[which]++;
		totals->sum[which] += number;
		if (number >= 0) {
			int power = 0;
			while (power < 63 && number >> power)
				power++;
			totals->buckets[power]++;
		}
	}
	return NULL;
}

int main(int argc, char **argv)
{
	long count = argc > 1 ? atol(argv[1]) : 1000;
	int threads = argc > 2 ? atoi(argv[2]) : 1;
	pthread_t *ids = calloc(threads, sizeof *ids);
	struct totals *all = calloc(threads, sizeof *all), sum = {0};
	per_thread = count / threads;
	for (int n = 0; n < threads; n++) {
		all[n].count[0] = n + 1;
		pthread_create(&ids[n], NULL, work, &all[n]);
	}
	for (int n = 0; n < threads; n++) {
		pthread_join(ids[n], NULL);
		for (int k = 0; k < NAMES; k++) {
			if (!all[n].count[k])
				continue;
			if (!sum.count[k] || all[n].least[k] < sum.least[k])
				sum.least[k] = all[n].least[k];
			if (!sum.count[k] || all[n].largest[k] > sum.largest[k])
				sum.largest[k] = all[n].largest[k];
			sum.count[k] += all[n].count[k];
			sum.sum[k] += all[n].sum[k];
		}
		for (int k = 0; k < 64; k++)
			sum.buckets[k] += all[n].buckets[k];
	}
	for (int k = 0; k < NAMES; k++)
		printf("%s|%ld|%ld|%ld|%ld\n", names[k], sum.count[k], sum.sum[k], sum.least[k], sum.largest[k]);
	for (int k = 0; k < 64; k++)
		if (sum.buckets[k])
			printf("bucket|%d|%ld\n", k, sum.buckets[k]);
	return 0;
}
