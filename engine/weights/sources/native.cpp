// Says what the page cache holds of a file, and takes shares of rows, without Python's interpreter lock.
//
// Everything here is an addition to plain reads (local.py), which carry on wherever it stops: it takes what it can and
// says how much that was. It keeps to no state beyond a call.
//
// Nothing is mapped. To map and unmap files excludes all other threads from the address space, while they have memory
// backed: two readers took half as long again as with reads, which are as fast by themselves.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

constexpr int64_t PROBE = 128 << 10;  // the page cache is asked for a byte in every so many
constexpr long CACHESTAT = 451;       // the number of the system call, on every architecture
constexpr int64_t UNDER_WAY = 128;    // rows that the system is told of ahead of the one that is waited for

// How many pages of [offset, offset + nbytes) the page cache holds, as Linux 6.5 and later say; -1 where it does not tell.
// Unlike a read that does not wait, this has nothing read ahead.
int64_t pages_cached(int file, int64_t offset, int64_t nbytes) {
    struct { uint64_t offset, nbytes; } range = {static_cast<uint64_t>(offset), static_cast<uint64_t>(nbytes)};
    struct { uint64_t cached, dirty, written, evicted, recently; } found = {};
    return syscall(CACHESTAT, file, &range, &found, 0) == 0 ? static_cast<int64_t>(found.cached) : -1;
}

// Whether the page cache holds the byte at `offset`; no where the file system does not tell.
bool is_cached(int file, int64_t offset) {
    char byte;
    struct iovec one = {&byte, 1};
    return preadv2(file, &one, 1, offset, RWF_NOWAIT) == 1;
}

// How many of `nbytes` from `offset` on seem to be in the page cache. What is counted and not there, between two probes
// or because it is still on its way, is waited for when it is touched, as in any read.
int64_t cached(int file, int64_t offset, int64_t nbytes) {
    const int64_t page = sysconf(_SC_PAGESIZE), whole = (offset + nbytes - 1) / page - offset / page + 1;
    const int64_t found = pages_cached(file, offset, nbytes);
    if (found == 0 || found == whole) return found ? nbytes : 0;
    for (int64_t at = 0; at < nbytes; at += PROBE) {
        const int64_t start = offset + at, length = nbytes - at < PROBE ? nbytes - at : PROBE;
        if (found < 0 ? !is_cached(file, start)
                      : pages_cached(file, start, length) != (start + length - 1) / page - start / page + 1)
            return at;
    }
    return found > 0 || is_cached(file, offset + nbytes - 1) ? nbytes : (nbytes - 1) / PROBE * PROBE;
}

void gather(const char *from, char *target, int64_t count, int64_t span, int64_t stride) {
    for (int64_t row = 0; row < count; row++) memcpy(target + row * span, from + row * stride, span);
}

}  // namespace

extern "C" {

// How many of `nbytes` from `offset` on seem to be in the page cache.
int64_t firstlight_cached(int file, int64_t offset, int64_t nbytes) { return cached(file, offset, nbytes); }

// Copies shares of rows, `span` of every `stride` bytes, while the page cache holds them and what lies between them: many
// rows come by one read into `scratch`, which stays in the processor's cache. How many rows that were.
int64_t firstlight_take_rows(int file, int64_t offset, char *target, int64_t count, int64_t span, int64_t stride,
                             char *scratch, int64_t scratch_bytes) {
    const int64_t each = scratch_bytes < span ? 0 : (scratch_bytes - span) / stride + 1;
    int64_t done = 0;
    while (done < count && each > 0) {
        const int64_t rows = count - done < each ? count - done : each;
        const int64_t start = offset + done * stride, nbytes = (rows - 1) * stride + span;
        if (cached(file, start, nbytes) < nbytes) return done;
        struct iovec one = {scratch, static_cast<size_t>(nbytes)};
        if (preadv2(file, &one, 1, start, RWF_NOWAIT) != nbytes) return done;
        gather(scratch, target + done * span, rows, span, stride);
        done += rows;
    }
    return done;
}

// Reads shares of rows one after the other, while the page cache holds them; how many rows that were.
int64_t firstlight_try_rows(int file, int64_t offset, char *target, int64_t count, int64_t span, int64_t stride) {
    if (cached(file, offset, span) < span) return 0;  // a read that does not wait would have more read ahead
    for (int64_t row = 0; row < count; row++) {
        struct iovec one = {target + row * span, static_cast<size_t>(span)};
        if (preadv2(file, &one, 1, offset + row * stride, RWF_NOWAIT) != span) return row;
    }
    return count;
}

// Reads shares of rows, from wherever they are, many of them under way at once; how many were read whole, or -errno.
int64_t firstlight_read_rows(int file, int64_t offset, char *target, int64_t count, int64_t span, int64_t stride) {
    for (int64_t row = 0, told = 0; row < count; row++) {
        for (; told < count && told < row + UNDER_WAY; told++)
            posix_fadvise(file, offset + told * stride, span, POSIX_FADV_WILLNEED);
        for (int64_t done = 0; done < span;) {
            ssize_t found = pread(file, target + row * span + done, span - done, offset + row * stride + done);
            if (found < 0 && errno == EINTR) continue;
            if (found < 0) return -errno;
            if (found == 0) return row;
            done += found;
        }
    }
    return count;
}

// Shares of rows out of memory.
void firstlight_gather(const char *from, char *target, int64_t count, int64_t span, int64_t stride) {
    gather(from, target, count, span, stride);
}

}  // extern "C"
