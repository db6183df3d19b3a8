/* Preloaded into a process, it writes down each call that changes a file or its folder, and each that syncs one, once
   the call has succeeded: a line "call<TAB>path[<TAB>target]" in the file that $FILE_CALLS names. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void note(const char *call, const char *path, const char *target) {
    static int log = -1;
    char line[3 * PATH_MAX];
    int before = errno, length;
    const char *name = getenv("FILE_CALLS");
    if (!name) return;
    if (log < 0) log = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    length = snprintf(line, sizeof line, "%s\t%s%s%s\n", call, path, target ? "\t" : "", target ? target : "");
    if (log >= 0 && length < (int)sizeof line) syscall(SYS_write, log, line, length); /* one write: a whole line */
    errno = before;
}

static void note_descriptor(const char *call, int descriptor) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length <= 0 || path[0] != '/') return; /* a pipe, a socket */
    path[length] = 0;
    note(call, path, NULL);
}

static void full_name(const char *path, char *full) {
    if (!realpath(path, full)) snprintf(full, PATH_MAX, "%s", path);
}

#define BY_DESCRIPTOR(type, name, parameters, arguments)    \
    type name parameters {                                  \
        type done = NEXT(name) arguments;                   \
        if (done >= 0) note_descriptor(#name, descriptor);  \
        return done;                                        \
    }

BY_DESCRIPTOR(ssize_t, write, (int descriptor, const void *data, size_t size), (descriptor, data, size))
BY_DESCRIPTOR(ssize_t, pwrite, (int descriptor, const void *data, size_t size, off_t at), (descriptor, data, size, at))
BY_DESCRIPTOR(ssize_t, pwrite64, (int descriptor, const void *data, size_t size, off64_t at),
              (descriptor, data, size, at))
BY_DESCRIPTOR(ssize_t, writev, (int descriptor, const struct iovec *parts, int count), (descriptor, parts, count))
BY_DESCRIPTOR(int, ftruncate, (int descriptor, off_t size), (descriptor, size))
BY_DESCRIPTOR(int, ftruncate64, (int descriptor, off64_t size), (descriptor, size))
BY_DESCRIPTOR(int, fsync, (int descriptor), (descriptor))
BY_DESCRIPTOR(int, fdatasync, (int descriptor), (descriptor))

#define OPENING(name)                                                             \
    int name(const char *path, int flags, ...) {                                  \
        va_list rest;                                                             \
        va_start(rest, flags);                                                    \
        int mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, int) : 0;       \
        va_end(rest);                                                             \
        int made = (flags & O_CREAT) && access(path, F_OK);                       \
        int descriptor = NEXT(name)(path, flags, mode);                           \
        if (descriptor >= 0 && made) {                                            \
            char full[PATH_MAX];                                                  \
            full_name(path, full);                                                \
            note("create", full, NULL);                                           \
        }                                                                         \
        return descriptor;                                                        \
    }

OPENING(open)
OPENING(open64)

int rename(const char *from, const char *to) {
    char full_from[PATH_MAX], full_to[PATH_MAX];
    full_name(from, full_from); /* while it has this name */
    int done = NEXT(rename)(from, to);
    if (!done) {
        full_name(to, full_to);
        note("rename", full_from, full_to);
    }
    return done;
}
