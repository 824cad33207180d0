/* container pivot|chroot ROOT PROGRAM: start the program in a mount namespace of its own, with another root directory. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <unistd.h>

static int change_root(int pivot, const char *root)
{
	if (!pivot)
		return chroot(root) || chdir("/");
	/* The root must be a mount point; the old one is put over the new one, and taken away. */
	return mount(root, root, 0, MS_BIND, 0) || chdir(root) || syscall(SYS_pivot_root, ".", ".") ||
	       umount2(".", MNT_DETACH) || chdir("/");
}

int main(int argc, char **argv)
{
	if (argc < 4)
		return 1;
	if (unshare(CLONE_NEWNS) || mount(0, "/", 0, MS_REC | MS_PRIVATE, 0) ||
	    change_root(!strcmp(argv[1], "pivot"), argv[2])) {
		perror("container");
		return 1;
	}
	execv(argv[3], argv + 3);
	perror(argv[3]);
	return 1;
}
