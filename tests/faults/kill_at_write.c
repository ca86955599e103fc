/* Loaded into a process and all that it starts (LD_PRELOAD): counts what changes a file system, and at the n-th such call
 * kills the whole process group, as `kill -9` or a power cut would.
 *
 * The plan lies in a file that all processes share: {count, stop, mode}. Mode 0 dies instead of the call. Mode 1 dies after
 * it; of a write only the first half is done then. Written for the tests of autokernel_hf.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct plan {
  volatile long count, stop, mode;
};
static struct plan *plan;

__attribute__((constructor)) static void start(void) {
  const char *path = getenv("AK_KILL_PLAN");
  if (!path) return;
  int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
  int fd = real(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  void *place = mmap(NULL, sizeof(struct plan), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (place != MAP_FAILED) plan = place;
}

static void die(void) {
  kill(0, SIGKILL);
  for (;;) pause();
}

/* Whether this is the call to die at. */
static int due(void) {
  if (!plan || plan->stop < 0) return 0; /* not armed */
  return __sync_add_and_fetch(&plan->count, 1) == plan->stop;
}

static int regular(int fd) {
  struct stat s;
  return fstat(fd, &s) == 0 && S_ISREG(s.st_mode);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define AROUND(name, call)              \
  do {                                  \
    int now = due();                    \
    if (now && plan->mode == 0) die();  \
    __typeof__(call) result = (call);   \
    if (now) die();                     \
    return result;                      \
  } while (0)

ssize_t write(int fd, const void *data, size_t size) {
  if (!regular(fd)) return REAL(write)(fd, data, size);
  int now = due();
  if (now && plan->mode == 0) die();
  ssize_t done = REAL(write)(fd, data, now ? size / 2 : size);
  if (now) die();
  return done;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
  int now = due();
  if (now && plan->mode == 0) die();
  ssize_t done = REAL(pwrite)(fd, data, now ? size / 2 : size, at);
  if (now) die();
  return done;
}

int fsync(int fd) { AROUND(fsync, REAL(fsync)(fd)); }
int fdatasync(int fd) { AROUND(fdatasync, REAL(fdatasync)(fd)); }
int ftruncate(int fd, off_t size) { AROUND(ftruncate, REAL(ftruncate)(fd, size)); }
int rename(const char *from, const char *to) { AROUND(rename, REAL(rename)(from, to)); }
int renameat(int a, const char *from, int b, const char *to) { AROUND(renameat, REAL(renameat)(a, from, b, to)); }
int link(const char *from, const char *to) { AROUND(link, REAL(link)(from, to)); }
int unlink(const char *path) { AROUND(unlink, REAL(unlink)(path)); }
int unlinkat(int at, const char *path, int flags) { AROUND(unlinkat, REAL(unlinkat)(at, path, flags)); }
int mkdir(const char *path, mode_t mode) { AROUND(mkdir, REAL(mkdir)(path, mode)); }

#define OPEN(name)                                                          \
  int name(const char *path, int flags, ...) {                              \
    va_list more;                                                           \
    va_start(more, flags);                                                  \
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;               \
    va_end(more);                                                           \
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);          \
    if (!(flags & (O_CREAT | O_TRUNC))) return real(path, flags, mode);     \
    AROUND(name, real(path, flags, mode));                                  \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                        \
  int name(int at, const char *path, int flags, ...) {                      \
    va_list more;                                                           \
    va_start(more, flags);                                                  \
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;               \
    va_end(more);                                                           \
    int (*real)(int, const char *, int, ...) = dlsym(RTLD_NEXT, #name);     \
    if (!(flags & (O_CREAT | O_TRUNC))) return real(at, path, flags, mode); \
    AROUND(name, real(at, path, flags, mode));                              \
  }
OPENAT(openat)
OPENAT(openat64)
