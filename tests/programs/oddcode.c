/*
 * oddcode copy | move | untraced | compat: calls work(), does something unusual with its code, and calls work() there.
 * copy: in a copy of the function. move: where mremap(2) has moved it to. untraced: in a child that is made with
 * CLONE_UNTRACED. compat: calls narrow(), 32-bit code in this 64-bit program, to be linked at a low address.
 * Status 0 if all results were right.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define SIZE 4096

typedef int function(int);

/* A page of its own, so that it can be moved. */
__asm__(".text\n.balign 4096\n.globl work\n.type work, @function\n"
	"work: lea 3(,%rdi,8), %eax\n sub %edi, %eax\n ret\n .size work, . - work\n .fill 32, 1, 0x90\n.balign 4096\n");
function work;

/*
 * As 64-bit code, the first two instructions of narrow() are one: mov %rax, %rdx.
 */
__asm__(".text\n.globl narrow\n.type narrow, @function\n"
	".code32\n"
	"narrow: dec %eax\n mov %eax, %edx\n add $5, %edx\n ljmp $0x33, $wide\n .size narrow, . - narrow\n"
	".code64\n"
	"wide: mov %r12, %rsp\n pop %r12\n mov %edx, %eax\n ret\n"
	".globl enter\nenter: push %r12\n mov %rsp, %r12\n mov %edi, %eax\n ljmpl *far_narrow\n"
	".data\nfar_narrow: .long narrow\n.word 0x23\n.text\n");
function enter;

static void *room(int protection)
{
	return mmap(NULL, SIZE, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

int main(int argc, char **argv)
{
	const char *how = argv[1];
	function *there = work;
	int status = 0;

	if (!strcmp(how, "compat"))
		return enter(10) != 14 || enter(20) != 24;
	if (work(1) != 10)
		return 1;
	if (!strcmp(how, "copy"))
		there = memcpy(room(PROT_READ | PROT_WRITE | PROT_EXEC), (void *)work, 32);
	if (!strcmp(how, "move"))
		there = mremap((void *)work, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, room(PROT_NONE));
	if (!strcmp(how, "untraced")) {
		long child = syscall(SYS_clone, CLONE_UNTRACED | SIGCHLD, 0, 0, 0, 0);

		if (!child)
			_exit(work(2) != 17);
		waitpid(child, &status, 0);
		printf("child %d\n", WIFSIGNALED(status) ? WTERMSIG(status) : 0);
		return work(3) != 24;
	}
	return there(2) != 17 || there(3) != 24;
}
