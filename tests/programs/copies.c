/* copies [again]: calls step() itself, and in processes that it forks and vforks; prints how many of these died. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
__attribute__((noinline)) int step(int n) { __asm__ volatile("" ::: "memory"); return n + 1; }
int main(int argc, char **argv)
{
	int failed = 0, status;
	setbuf(stdout, NULL);
	for (int i = 0; i < 5; i++) {
		step(i);
		pid_t child = fork();
		if (!child) { for (int k = 0; k < 10; k++) step(k); _exit(7); }
		waitpid(child, &status, 0);
		failed += !WIFEXITED(status) || WEXITSTATUS(status) != 7;
		child = vfork();
		if (!child) { step(3); _exit(8); }
		waitpid(child, &status, 0);
		failed += !WIFEXITED(status) || WEXITSTATUS(status) != 8;
	}
	if (argc > 1) {
		argv[1] = NULL;
		execv(argv[0], argv);
	}
	printf("%d\n", failed);
	return failed;
}
