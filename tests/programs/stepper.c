/*
 * Step a command one instruction at a time, and count how often it arrives at given places of files.
 *
 * Usage: stepper FILE... -- COMMAND...; the places are on standard input, one a line: the number of the file, from 0 on,
 * and the offset in hexadecimal. Written to standard error, for each place in order: its arrivals, and those since the
 * program's entry; the second is less where the dynamic linker and constructors came by. The command must have one thread
 * and one process. A repeated string instruction is one arrival: the address of the step before it was its own.
 */

#define _GNU_SOURCE
#include <elf.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/personality.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANGES 64
#define FILES 16

struct file {
    struct stat status;
    uint32_t *all, *late;
};

struct range {
    uint64_t start, end, offset;
    struct file *file;
};

static struct file files[FILES];
static int file_count;

static struct range ranges[RANGES];
static int range_count;

static void fail(const char *what)
{
    perror(what);
    exit(99);
}

static void read_ranges(pid_t pid)
{
    char name[64], line[PATH_MAX + 128];
    snprintf(name, sizeof name, "/proc/%d/maps", pid);
    FILE *maps = fopen(name, "r");
    if (!maps)
        fail("maps");
    range_count = 0;
    while (fgets(line, sizeof line, maps)) {
        struct range *range = &ranges[range_count];
        unsigned major, minor;
        unsigned long inode;
        char rights[8];
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s %" SCNx64 " %x:%x %lu", &range->start, &range->end, rights,
                   &range->offset, &major, &minor, &inode) == 7 && rights[2] == 'x' && range_count < RANGES - 1) {
            range->file = NULL;
            for (int i = 0; i < file_count; i++)
                if (files[i].status.st_ino == inode)
                    range->file = &files[i];
            range_count++;
        }
    }
    fclose(maps);
}

static struct range *range_of(uint64_t address)
{
    static struct range *last = ranges;
    if (last - ranges < range_count && address >= last->start && address < last->end)
        return last;
    for (int i = 0; i < range_count; i++)
        if (address >= ranges[i].start && address < ranges[i].end)
            return last = &ranges[i];
    return NULL;
}

static uint64_t entry_of(pid_t pid)
{
    char name[64];
    uint64_t pair[2];
    snprintf(name, sizeof name, "/proc/%d/auxv", pid);
    int fd = open(name, O_RDONLY);
    while (read(fd, pair, sizeof pair) == sizeof pair)
        if (pair[0] == AT_ENTRY) {
            close(fd);
            return pair[1];
        }
    fail("auxv");
    return 0;
}

int main(int argc, char **argv)
{
    for (argv++; *argv && strcmp(*argv, "--") && file_count < FILES; argv++) {
        struct file *file = &files[file_count++];
        if (stat(*argv, &file->status))
            fail(*argv);
        file->all = calloc(file->status.st_size, sizeof *file->all);
        file->late = calloc(file->status.st_size, sizeof *file->late);
    }
    if (argc < 4 || !*argv || !*++argv)
        fail("usage: stepper FILE... -- COMMAND...");
    // Each step is two switches between the processes, which take less time on one processor.
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
    pid_t pid = fork();
    if (pid == 0) {
        personality(ADDR_NO_RANDOMIZE);
        ptrace(PTRACE_TRACEME, 0, 0, 0);
        int nothing = open("/dev/null", O_RDONLY);
        dup2(nothing, 0);
        execv(*argv, argv);
        fail(*argv);
    }
    int status, entered = 0, signal = 0;
    if (waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status))
        fail("exec");
    uint64_t entry = entry_of(pid), before = 0;
    for (;;) {
        uint64_t ip = ptrace(PTRACE_PEEKUSER, pid, offsetof(struct user_regs_struct, rip), 0);
        struct range *range = range_of(ip);
        if (!range) {
            read_ranges(pid);
            range = range_of(ip);
        }
        entered |= ip == entry;
        if (range && range->file && ip != before) {
            uint64_t offset = ip - range->start + range->offset;
            range->file->all[offset]++;
            range->file->late[offset] += entered;
        }
        before = ip;
        if (ptrace(PTRACE_SINGLESTEP, pid, 0, signal) || waitpid(pid, &status, 0) != pid)
            fail("step");
        if (!WIFSTOPPED(status))
            break;
        signal = WSTOPSIG(status) == SIGTRAP ? 0 : WSTOPSIG(status);
    }
    unsigned number;
    uint64_t offset;
    while (scanf("%u %" SCNx64, &number, &offset) == 2)
        fprintf(stderr, "%" PRIu32 " %" PRIu32 "\n", files[number].all[offset], files[number].late[offset]);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
