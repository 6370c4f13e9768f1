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
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

constexpr int64_t PROBE = 1 << 20;    // the page cache is asked for a byte in every so many
constexpr long CACHESTAT = 451;       // the number of the system call, on every architecture
constexpr int64_t UNDER_WAY = 128;    // rows that the system is told of ahead of the one that is waited for
constexpr int64_t LINE = 64;          // bytes of a line of the processor's cache; a power of two

// How many pages of [offset, offset + nbytes) the page cache holds, as Linux 6.5 and later say; -1 where it does not.
// Unlike a read that does not wait, this has nothing read ahead.
int64_t pages_cached(int file, int64_t offset, int64_t nbytes) {
    struct { uint64_t offset, nbytes; } range = {static_cast<uint64_t>(offset), static_cast<uint64_t>(nbytes)};
    struct { uint64_t cached, dirty, written, evicted, recently; } found = {};
    return syscall(CACHESTAT, file, &range, &found, 0) == 0 ? static_cast<int64_t>(found.cached) : -1;
}

// Whether the page cache holds the byte at `offset`; no where the file system does not tell.
bool is_cached(int file, int64_t offset) {
    const int64_t found = pages_cached(file, offset, 1);
    if (found >= 0) return found > 0;
    char byte;
    struct iovec one = {&byte, 1};
    return preadv2(file, &one, 1, offset, RWF_NOWAIT) == 1;
}

// How many of `nbytes` from `offset` on seem to be in the page cache, going by a byte in every so many: to count all pages
// takes a tenth of the time of copying them. Reads that do not wait stop at what is missing between two of those. The page
// cache may hold pages behind the end of a file, in one piece with its last ones: these are none of it.
int64_t cached(int file, int64_t offset, int64_t nbytes) {
    struct stat found;
    if (fstat(file, &found) == 0 && nbytes > found.st_size - offset) nbytes = found.st_size - offset;
    if (nbytes <= 0) return 0;
    for (int64_t at = 0; at < nbytes; at += PROBE)
        if (!is_cached(file, offset + at)) return at;
    return is_cached(file, offset + nbytes - 1) ? nbytes : (nbytes - 1) / PROBE * PROBE;
}

// Copies to memory that is not read soon, past the processor's cache: whole lines are written without being fetched.
void copy(char *target, const char *from, int64_t nbytes) {
#ifdef __SSE2__
    const int64_t head = -reinterpret_cast<intptr_t>(target) & (LINE - 1);
    if (nbytes >= head + 2 * LINE) {
        memcpy(target, from, head);
        target += head, from += head, nbytes -= head;
        for (; nbytes >= LINE; target += LINE, from += LINE, nbytes -= LINE) {
            auto to = reinterpret_cast<__m128i *>(target);
            auto line = reinterpret_cast<const __m128i *>(from);
            const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
            const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
            _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b);
            _mm_stream_si128(to + 2, c), _mm_stream_si128(to + 3, d);
        }
    }
#endif
    memcpy(target, from, nbytes);
}

// Whoever is told of the end of `copy` finds what it wrote.
void copied() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

void gather(const char *from, char *target, int64_t count, int64_t span, int64_t stride) {
    for (int64_t row = 0; row < count; row++) copy(target + row * span, from + row * stride, span);
    copied();
}

// The first place in the scratch that lies as many bytes behind a line's start as `offset` does in its file: the kernel
// copies from its pages there in half the time or a third of it. `LINE` bytes of the scratch are for that.
char *in_step(char *scratch, int64_t offset) {
    return scratch + ((offset - reinterpret_cast<intptr_t>(scratch)) & (LINE - 1));
}

}  // namespace

extern "C" {

// How many of `nbytes` from `offset` on seem to be in the page cache.
int64_t firstlight_cached(int file, int64_t offset, int64_t nbytes) { return cached(file, offset, nbytes); }

// Reads a range, as far as the page cache holds it, by way of `scratch`, which stays in the processor's cache: for memory
// that is out of step with the file. How many bytes that were.
int64_t firstlight_take(int file, int64_t offset, char *target, int64_t nbytes, char *scratch, int64_t scratch_bytes) {
    int64_t done = 0;
    while (done < nbytes) {
        const int64_t left = nbytes - done, most = scratch_bytes - LINE;
        struct iovec one = {in_step(scratch, offset + done), static_cast<size_t>(left < most ? left : most)};
        const ssize_t found = preadv2(file, &one, 1, offset + done, RWF_NOWAIT);
        if (found <= 0) break;
        copy(target + done, static_cast<const char *>(one.iov_base), found);
        done += found;
    }
    copied();
    return done;
}

// Copies shares of rows, `span` of every `stride` bytes, while the page cache holds them and what lies between them: many
// rows come by one read into `scratch`, which stays in the processor's cache. How many rows that were.
int64_t firstlight_take_rows(int file, int64_t offset, char *target, int64_t count, int64_t span, int64_t stride,
                             char *scratch, int64_t scratch_bytes) {
    const int64_t most = scratch_bytes - LINE, each = most < span ? 0 : (most - span) / stride + 1;
    int64_t done = 0;
    while (done < count && each > 0) {
        const int64_t rows = count - done < each ? count - done : each;
        const int64_t start = offset + done * stride, nbytes = (rows - 1) * stride + span;
        if (cached(file, start, nbytes) < nbytes) return done;
        char *place = in_step(scratch, start);
        struct iovec one = {place, static_cast<size_t>(nbytes)};
        if (preadv2(file, &one, 1, start, RWF_NOWAIT) != nbytes) return done;
        gather(place, target + done * span, rows, span, stride);
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
