/*
 * A hostile target: it does to what a tracer shares with it whatever a process can, at random.
 *
 *     neighbour SEED [LIBRARY]    calls 'work', of the library if there is one, in two threads until its input ends
 *
 * With a library (this file with -DLIBRARY) it does nothing to memory, but changes that file, puts others in its place,
 * and gives itself and its children names with which terminals can be disturbed. With -DHARMLESS it only calls 'work'.
 * Otherwise:
 *
 * One thread writes into, unmaps, replaces and protects what is mapped of the tracer; a process with the same files looks
 * for such as are open for a moment, and makes them shorter; another one with the same memory changes words in pages
 * that are new, and puts other files in the place of new ones if it has the same files as well.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT(array) (sizeof array / sizeof *array)
#define AREAS 64

volatile long sum;

__attribute__((noinline)) long work(long a, const char *text)
{
    sum += a + (text != 0);
    __asm__ volatile("nop;nop;nop;nop;nop;nop" ::: "memory");
    return a + 1;
}

#ifdef HARMLESS
int main(void)
{
    for (long number = 0; number < 300000; number++) {
        work(number, "text");
        usleep(200);
    }
    return 0;
}
#elif !defined LIBRARY
static volatile int over;
static uint64_t state;
static int deaf;

static const uint64_t values[] = {0, 1, 8, 16, 0x7f, 0xff, 0xffff, 0x10000, 0x7fffffff, 0x80000000, 0xffffffff, 0x40000000,
    0x3fffffff, 0xffffffff00000000, 0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff, 0xfffffffffffffff8};

static uint64_t next(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static uint64_t any(void)
{
    return next() & 1 ? next() : values[next() % COUNT(values)];
}

static long (*volatile called)(long, const char *) = work;
static __thread sigjmp_buf back;

/* The code of a file that has become shorter is not there, and that of a file that was changed is anything. */
static void on_fault(int number)
{
    (void)number;
    siglongjmp(back, 1);
}

static void *hot(void *unused)
{
    volatile long number = 0;
    (void)unused;
    if (sigsetjmp(back, 1))
        usleep(1000);
    while (!over) {
        called(number++, "text");
        if (number % 64 == 0)
            usleep(100);
    }
    return 0;
}

struct area {
    unsigned long start, end;
    int is_writable, is_new;
};

/* Find what is mapped of the tracer, and private pages; is_new is set for those of the latter that 'known' lacks. */
static int find(struct area *found, const struct area *known, int known_count)
{
    static char buffer[2][1 << 17];
    char *text = buffer[known != 0];
    int file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC), size = 0, count = 0, got;
    while ((got = read(file, text + size, sizeof buffer[0] - 1 - size)) > 0)
        size += got;
    close(file);
    text[size] = 0;
    for (char *line = text, *end; line && *line && count < AREAS; line = end ? end + 1 : 0) {
        end = strchr(line, '\n');
        if (end)
            *end = 0;
        struct area area = {0, 0, 0, 0};
        char permissions[8] = "";
        if (sscanf(line, "%lx-%lx %7s", &area.start, &area.end, permissions) != 3)
            continue;
        area.is_writable = permissions[1] == 'w';
        int is_ours = strstr(line, "dprobes") != 0, is_private = strstr(line, "rw-p 00000000 00:00 0") && !strchr(line, '[');
        if (known ? !is_private : !is_ours)
            continue;
        area.is_new = 1;
        for (int each = 0; each < known_count; each++)
            if (known && known[each].start == area.start)
                area.is_new = 0;
        found[count++] = area;
    }
    return count;
}

static void harm(struct area area, int way)
{
    unsigned long size = area.end - area.start, place = next() % (size / 8) * 8, page = place & ~4095ul;
    volatile uint64_t *word = (volatile uint64_t *)(area.start + place), *first = (volatile uint64_t *)(area.start + page);
    unsigned count = 1 + next() % 64;
    void *at = (void *)area.start;
    switch (area.is_writable ? way : 7) {
    case 0: /* words in a row */
        for (unsigned each = 0; each < count && place + 8 * each + 8 <= size; each++)
            word[each] = any();
        break;
    case 1: /* single words, at the beginning of pages as well: heads of rings */
        *(next() & 1 ? word : first) = any();
        break;
    case 2: /* a little more or less, where something is */
        if (*word)
            *word += next() % 65 - 32;
        break;
    case 3: /* bits */
        if (*word)
            *word ^= 1ull << next() % 64;
        break;
    case 4:
        memset((void *)first, next() & 1 ? 0xff : 0, 4096);
        break;
    case 5:
        madvise((void *)first, 4096, MADV_REMOVE);
        break;
    case 6: /* entries that are never complete */
        for (unsigned each = 0; each < 512; each += 2)
            *(volatile uint32_t *)(first + each) = 0x80000000u | (next() & 0xfff);
        break;
    case 7:
        mprotect(at, size, PROT_READ | (next() & 1 ? PROT_WRITE : 0));
        usleep(500);
        mprotect(at, size, PROT_READ | PROT_WRITE);
        break;
    case 8:
        munmap(at, size);
        break;
    case 9: /* something else in its place */
        mmap(at, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        break;
    case 10: /* a record that a handler could have made: as another one, with something else in it */
        memcpy((void *)(area.start + next() % (size / 4096) * 4096), (void *)first, 256);
        break;
    }
}

static void *harmful(void *chosen)
{
    static struct area areas[AREAS];
    int way = *(int *)chosen;
    while (!over) {
        int count = find(areas, 0, 0);
        for (int round = 0; count && round < 100 && !over; round++) {
            harm(areas[next() % count], way);
            if (way >= 7)
                break;
        }
        usleep(count ? 200 : 2000);
    }
    return 0;
}

/* Make files of the tracer shorter while they are open in the process. */
static void shorten(int pid)
{
    char directory[64], path[128], name[256];
    snprintf(directory, sizeof directory, "/proc/%d/fd", pid);
    for (;;) {
        DIR *open_files = opendir(directory);
        struct dirent *entry;
        if (!open_files)
            _exit(0);
        while ((entry = readdir(open_files))) {
            snprintf(path, sizeof path, "%s/%.16s", directory, entry->d_name);
            ssize_t size = readlink(path, name, sizeof name - 1);
            if (size <= 0)
                continue;
            name[size] = 0;
            int file = strstr(name, "dprobes") ? open(path, O_RDWR) : -1;
            if (file >= 0) {
                while (ftruncate(file, 0) && errno == EINTR)
                    ;
                close(file);
            }
        }
        closedir(open_files);
    }
}

static int accomplice(void *with_files)
{
    static struct area known[AREAS], now[AREAS];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int known_count = find(known, now, 0);
    while (!over) {
        int count = find(now, known, known_count);
        for (int each = 0; each < count; each++) {
            volatile uint32_t *words = (volatile uint32_t *)now[each].start;
            for (int round = 0; now[each].is_new && round < 200000 && !over; round++) {
                words[round % 64] = round & 1 ? (uint32_t)deaf : (uint32_t)(next() % 64); /* where arguments and results of calls are */
                if (*(int *)with_files && round % 64 == 0)
                    dup2(deaf, 16 + next() % 8);
            }
        }
    }
    return 0;
}

static void put(const char *path, const char *data, long size)
{
    int file = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0755);
    pwrite(file, data, size, 0);
    ftruncate(file, size);
    close(file);
}

static void fill(char *name, int size)
{
    static const char *const parts[] = {"\033]0;x\007", "\033[2J", "\n", "\r", "%n%s", "\"", "\377\376", "\u202e", "{}", "a"};
    for (name[0] = 0; strlen(name) + 8 < (size_t)size;)
        strcat(name, parts[next() % COUNT(parts)]);
}

static void change(const char *path, char *data, long size)
{
    char aside[4096], name[4096];
    snprintf(aside, sizeof aside, "%s.aside", path);
    int file = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    switch (next() % 12) {
    case 0:
        ftruncate(file, next() % size);
        break;
    case 1: /* as large as can be, without taking room */
        ftruncate(file, 1l << (33 + next() % 10));
        break;
    case 2: /* the header, and the headers of segments */
        for (int each = 0; each < 8; each++)
            pwrite(file, &(uint64_t){any()}, 8, next() % 128 * 8);
        break;
    case 3: /* tables: symbols, sections, debug information */
        for (int each = 0; each < 64; each++)
            pwrite(file, &(uint64_t){any()}, 1 + next() % 8, next() % size);
        break;
    case 4:
        rename(path, aside);
        mkfifo(path, 0644);
        break;
    case 5:
        rename(path, aside);
        symlink(next() & 1 ? "/dev/zero" : "/proc/self/mem", path);
        break;
    case 6:
        rename(path, aside);
        symlink(path, path);
        break;
    case 7:
        rename(path, aside);
        mkdir(path, 0755);
        break;
    case 8: /* another file of the same kind, which is mapped as well */
        put(aside, data, size);
        rename(aside, path);
        if (dlopen(path, RTLD_NOW | RTLD_LOCAL) == 0)
            usleep(100);
        break;
    case 9: /* code that is mapped once more */
        for (int each = 0; each < 64; each++)
            mmap(0, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, next() % (size / 4096) * 4096);
        break;
    case 10:
        fill(name, 16);
        prctl(PR_SET_NAME, name);
        break;
    case 11: /* a child with such a name and arguments, which ends at once */
        if (fork() == 0) {
            fill(name, sizeof name);
            execl("/bin/true", name, name, (char *)0);
            _exit(0);
        }
        while (waitpid(-1, 0, WNOHANG) > 0)
            ;
        break;
    }
    usleep(next() % 20000);
    if (next() % 4) {
        rmdir(path);
        unlink(aside);
        struct stat status;
        if (lstat(path, &status) == 0 && !S_ISREG(status.st_mode))
            unlink(path);
        put(path, data, size);
    }
    close(file);
}

static void *changing(void *path)
{
    struct stat status;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    fstat(file, &status);
    char *data = malloc(status.st_size);
    read(file, data, status.st_size);
    close(file);
    while (!over) {
        if (sigsetjmp(back, 1) == 0)
            change(path, data, status.st_size);
    }
    return 0;
}

int main(int count, char **arguments)
{
    int seed = count > 1 ? atoi(arguments[1]) : 1, pair[2], way, with_files;
    state = 88172645463325252ull ^ (seed * 0x9E3779B97F4A7C15ull);
    for (int each = 0; each < 8; each++)
        next();
    way = seed % 11;
    with_files = next() & 1;
    socketpair(AF_UNIX, SOCK_DGRAM, 0, pair);
    deaf = dup2(pair[0], 15);
    while (send(deaf, arguments, 8, MSG_DONTWAIT) > 0)
        ;
    for (int each = 20; each < 24; each++) /* numbers of its own, so that those of new files can be guessed */
        dup2(deaf, each);
    int main_process = getpid();
    pthread_t threads[3];
    if (count > 2) {
        void *library = dlopen(arguments[2], RTLD_NOW);
        called = (long (*)(long, const char *))dlsym(library, "work");
        for (int each = 0; each < 3; each++)
            signal((int[]){SIGBUS, SIGSEGV, SIGILL}[each], on_fault);
        goto hot;
    }
    if (next() % 3 == 0 && fork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        shorten(main_process);
    }
    if (next() % 2 == 0) {
        char *stack = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        clone(accomplice, stack + (1 << 20) - 64, CLONE_VM | (with_files ? CLONE_FILES : 0), &with_files);
    }
    if (next() % 4 == 0) { /* a list of what a killed run has left, of which nothing is true */
        int file = memfd_create("dprobes-left", 0);
        uint64_t head[2] = {0x315345424F525044ull, next() & 1 ? 4096 : any()}; /* DPROBES1 */
        ftruncate(file, 4 << 20);
        pwrite(file, head, sizeof head, 0);
        for (int each = 16; each < 4096; each += 8)
            pwrite(file, &(uint64_t){any()}, 8, each);
        mmap(0, 4 << 20, PROT_READ, MAP_PRIVATE, file, 0);
        close(file);
    }
    pthread_create(&threads[2], 0, harmful, &way);
hot:
    pthread_create(&threads[0], 0, hot, 0);
    pthread_create(&threads[1], 0, hot, 0);
    puts("ready");
    fflush(stdout);
    if (count > 2)
        pthread_create(&threads[2], 0, changing, arguments[2]);
    char byte;
    while (read(0, &byte, 1) > 0)
        ;
    over = 1;
    kill(main_process, SIGKILL);
    return 0;
}
#endif
