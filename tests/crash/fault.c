/* A library for LD_PRELOAD that makes a program die, stop or fail at the N-th call that changes a file system.
 *
 *   FAULT_AT=N       the call, counted from 1 over all threads; 0 for none
 *   FAULT=kill       the process gets SIGKILL before the call
 *   FAULT=stop       the process gets SIGSTOP before the call; whoever started it does something and continues it
 *   FAULT=once:E     the call fails with errno E
 *   FAULT=from:E     this call and all later ones fail with errno E
 *   FAULT_SHORT=1    every write and positioned read does only a part of what it was asked for, or nothing with EINTR
 *   FAULT_LOG=FILE   one line "N call path" for each call that is counted
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum fault { NONE, KILL, STOP, ONCE, FROM };

static enum fault fault;
static long fault_at;
static int fault_errno, fault_short, log_fd = -1;
static atomic_long calls, transfers;

__attribute__((constructor)) static void begin(void)
{
    const char *at = getenv("FAULT_AT"), *what = getenv("FAULT"), *log = getenv("FAULT_LOG");
    fault_at = at ? atol(at) : 0;
    fault_short = getenv("FAULT_SHORT") != NULL;
    if (what && strcmp(what, "kill") == 0) fault = KILL;
    if (what && strcmp(what, "stop") == 0) fault = STOP;
    if (what && strncmp(what, "once:", 5) == 0) fault = ONCE;
    if (what && strncmp(what, "from:", 5) == 0) fault = FROM;
    if (fault == ONCE || fault == FROM) fault_errno = atoi(what + 5);
    if (log) {
        int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
        log_fd = real(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    }
}

/* Counts a call; says whether it is to fail. */
static int counted(const char *call, const char *path, int fd)
{
    char link[64], name[4096] = "";
    long n = atomic_fetch_add(&calls, 1) + 1;
    if (log_fd >= 0) {
        char line[4400];
        if (path == NULL) {
            snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
            ssize_t length = readlink(link, name, sizeof name - 1);
            name[length < 0 ? 0 : length] = 0;
            path = name;
        }
        int length = snprintf(line, sizeof line, "%ld %s %s\n", n, call, path);
        ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
        (void)!real(log_fd, line, (size_t)length);
    }
    if (fault_at == 0 || n < fault_at || fault == NONE) return 0;
    if (n == fault_at && fault == KILL) raise(SIGKILL);
    if (n == fault_at && fault == STOP) raise(SIGSTOP);
    if (fault == FROM || (fault == ONCE && n == fault_at)) {
        errno = fault_errno;
        return 1;
    }
    return 0;
}

/* How much of a transfer is done: all, a part, or, every third time, nothing but EINTR. */
static int cut(size_t *count)
{
    if (!fault_short || *count < 2) return 0;
    if (atomic_fetch_add(&transfers, 1) % 3 == 2) {
        errno = EINTR;
        return 1;
    }
    *count = *count / 2 + 1;
    return 0;
}

#define REAL(type, name, ...) type (*real)(__VA_ARGS__) = dlsym(RTLD_NEXT, name)

static int changes(int flags)
{
    return (flags & (O_CREAT | O_TRUNC)) != 0 || (flags & O_ACCMODE) != O_RDONLY;
}

#define OPEN(name)                                                              \
    int name(const char *path, int flags, ...)                                  \
    {                                                                           \
        va_list list;                                                           \
        va_start(list, flags);                                                  \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; \
        va_end(list);                                                           \
        REAL(int, #name, const char *, int, ...);                               \
        if (changes(flags) && counted("open", path, -1)) return -1;             \
        return real(path, flags, mode);                                         \
    }

OPEN(open)
OPEN(open64)

#define PATH(name)                                \
    int name(const char *path)                    \
    {                                             \
        REAL(int, #name, const char *);           \
        return counted(#name, path, -1) ? -1 : real(path); \
    }

PATH(unlink)
PATH(rmdir)

int mkdir(const char *path, mode_t mode)
{
    REAL(int, "mkdir", const char *, mode_t);
    return counted("mkdir", path, -1) ? -1 : real(path, mode);
}

int rename(const char *from, const char *to)
{
    REAL(int, "rename", const char *, const char *);
    return counted("rename", to, -1) ? -1 : real(from, to);
}

int fsync(int fd)
{
    REAL(int, "fsync", int);
    return counted("fsync", NULL, fd) ? -1 : real(fd);
}

ssize_t write(int fd, const void *bytes, size_t count)
{
    REAL(ssize_t, "write", int, const void *, size_t);
    if (fd > 2 && (counted("write", NULL, fd) || cut(&count))) return -1;
    return real(fd, bytes, count);
}

#define PWRITE(name)                                                  \
    ssize_t name(int fd, const void *bytes, size_t count, off_t at)   \
    {                                                                 \
        REAL(ssize_t, #name, int, const void *, size_t, off_t);       \
        if (counted("pwrite", NULL, fd) || cut(&count)) return -1;    \
        return real(fd, bytes, count, at);                            \
    }

PWRITE(pwrite)
PWRITE(pwrite64)

#define PREAD(name)                                             \
    ssize_t name(int fd, void *bytes, size_t count, off_t at)   \
    {                                                           \
        REAL(ssize_t, #name, int, void *, size_t, off_t);       \
        return cut(&count) ? -1 : real(fd, bytes, count, at);   \
    }

PREAD(pread)
PREAD(pread64)
