/*
 * hotfloats THREADS once: when a byte comes all threads call sum_double, and each prints a line. Then all call the rest.
 * hotfloats THREADS [PAUSE]: threads that compute with the x87 unit, SSE and AVX in tight loops, in which PAUSE turns of
 * an empty loop pass between two calls, until SIGUSR2. Each result is compared with that of the first call, which is made
 * before "ready". Status 0 if all were right.
 *
 * Most instructions here are other valid instructions without their first byte: a thread that goes on one byte behind a
 * breakpoint computes something else, or crashes.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FUNCTION(name, code) \
	".balign 32\n.globl " name "\n.type " name ", @function\n" name ": " code "\nret\n.size " name ", . - " name "\n"

struct lanes {
	_Alignas(32) double number[4];
};

/* Each leaves in *result what it computes of *left and *right. */
__asm__(".text\n"
	FUNCTION("sum_double", "addsd %xmm1, %xmm0")
	FUNCTION("product_single", "mulss %xmm1, %xmm0")
	FUNCTION("root_double", "sqrtsd %xmm1, %xmm0")
	FUNCTION("shuffled", "pshufhw $27, %xmm1, %xmm0")
	FUNCTION("load_double", "movsd (%rdi), %xmm0\n addsd (%rsi), %xmm0")
	FUNCTION("sum_packed", "vaddpd %ymm1, %ymm0, %ymm0")
	FUNCTION("sum_x87", "fldl (%rdi)\n faddl (%rsi)\n fstpl (%rdx)\n movsd (%rdx), %xmm0")
	".text\n");

#define CALL(name) \
	static void call_##name(const struct lanes *left, const struct lanes *right, struct lanes *result) \
	{ \
		double scratch = 0; \
		__asm__ volatile("vmovapd (%0), %%ymm0\n vmovapd (%1), %%ymm1\n" \
			"lea -128(%%rsp), %%rsp\n call " #name "\n lea 128(%%rsp), %%rsp\n" /* not into the red zone */ \
			"vmovapd %%ymm0, (%3)" \
			: : "D"(left), "S"(right), "d"(&scratch), "c"(result) \
			: "rax", "r8", "r9", "r10", "r11", "xmm0", "xmm1", "st", "memory", "cc"); \
	}
CALL(sum_double)
CALL(product_single)
CALL(root_double)
CALL(shuffled)
CALL(load_double)
CALL(sum_packed)
CALL(sum_x87)

static const struct call {
	const char *name;
	void (*make)(const struct lanes *, const struct lanes *, struct lanes *);
} calls[] = {
	{ "sum_double", call_sum_double }, { "product_single", call_product_single }, { "root_double", call_root_double },
	{ "shuffled", call_shuffled }, { "load_double", call_load_double }, { "sum_packed", call_sum_packed },
	{ "sum_x87", call_sum_x87 },
};
#define CALLS (sizeof calls / sizeof *calls)

static const struct lanes left = { { 1.25, -3.5, 1e100, 7.0625 } }, right = { { 2.0, 1e-9, 3.141592653589793, -8.5 } };
static struct lanes expected[CALLS];
static atomic_int over, wrong;
static int pause_turns;
static pthread_barrier_t start, rest;

static void check(const struct call *call)
{
	struct lanes result, *right_one = &expected[call - calls];

	call->make(&left, &right, &result);
	if (!memcmp(&result, right_one, sizeof result))
		return;
	wrong = 1;
	fprintf(stderr, "%s gave %a %a %a %a\n", call->name, result.number[0], result.number[1], result.number[2],
		result.number[3]);
}

static void *spin(void *argument)
{
	while (!over)
		for (unsigned n = 0; n < CALLS; n++) {
			check(&calls[n]);
			for (volatile int turn = 0; turn < pause_turns; turn++)
				;
		}
	return argument;
}

static void *call_once(void *argument)
{
	pthread_barrier_wait(&start);
	check(&calls[0]);
	puts("done");
	pthread_barrier_wait(&rest);
	for (unsigned n = 1; n < CALLS; n++)
		check(&calls[n]);
	return argument;
}

static void on_enough(int number)
{
	over = 1;
}

int main(int argc, char **argv)
{
	int count = atoi(argv[1]), once = argc > 2 && !strcmp(argv[2], "once");
	pthread_t ids[16];

	pause_turns = argc > 2 ? atoi(argv[2]) : 0;
	pthread_barrier_init(&start, NULL, count + 1);
	pthread_barrier_init(&rest, NULL, count);
	setlinebuf(stdout);
	signal(SIGUSR2, on_enough);
	for (unsigned n = 0; n < CALLS; n++)
		calls[n].make(&left, &right, &expected[n]);
	for (int n = 0; n < count; n++)
		pthread_create(&ids[n], NULL, once ? call_once : spin, NULL);
	puts("ready");
	if (once && getchar() != EOF)
		pthread_barrier_wait(&start);
	for (int n = 0; n < count; n++)
		pthread_join(ids[n], NULL);
	return wrong;
}
