// Takes what the page cache holds of a file, and shares of rows, without Python's interpreter lock.
//
// Everything here is an addition to plain reads (local.py), which carry on wherever it stops: it takes what it can and
// says how much that was. It keeps to no state beyond a call but one: while somebody copies from a mapping, SIGBUS is
// handled, since a file that is cut meanwhile, or a disk that fails, must end as an error of a read and never as a crash.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <cerrno>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t PAGE = 4096;          // a larger page of the system only makes a mapping begin earlier than it must
constexpr int64_t WINDOW = 2 << 20;     // mapped at a time: mappings count as resident memory
constexpr int64_t PROBE = 128 << 10;    // the page cache is asked for a byte in every so many
constexpr long CACHESTAT = 451;         // the number of the system call, on every architecture
constexpr int64_t UNDER_WAY = 128;      // rows that the system is told of ahead of the one that is waited for

struct Guard {
    sigjmp_buf back;
    const char *from, *to;
};

__attribute__((tls_model("initial-exec"))) thread_local Guard *guard = nullptr;
std::mutex handling;
int copying = 0;
struct sigaction before;

void on_bus_error(int number, siginfo_t *info, void *context) {
    const char *at = static_cast<const char *>(info->si_addr);
    if (guard != nullptr && guard->from <= at && at < guard->to) siglongjmp(guard->back, 1);
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
        sigaction(number, &before, nullptr);  // the instruction is carried out again, and ends as it would have
    } else {
        before.sa_handler(number);
    }
}

// As long as one is alive, a bus error in `guard` comes back to whoever set it; all others go where they went before.
struct Handled {
    Handled() {
        std::lock_guard<std::mutex> held(handling);
        if (copying++ > 0) return;
        struct sigaction ours = {};
        ours.sa_sigaction = on_bus_error;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&ours.sa_mask);
        sigaction(SIGBUS, &ours, &before);
    }
    ~Handled() {
        std::lock_guard<std::mutex> held(handling);
        if (--copying > 0) return;
        struct sigaction now = {};
        sigaction(SIGBUS, nullptr, &now);
        if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error) sigaction(SIGBUS, &before, nullptr);
    }
};

#if defined(__x86_64__)
// Past the caches: what is written here is not read again soon, and need not be fetched before it is overwritten.
__attribute__((target("avx512f"))) void stream(char *to, const char *from, int64_t nbytes) {
    for (; nbytes >= 256; nbytes -= 256, to += 256, from += 256) {
        __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
        __m512i c = _mm512_loadu_si512(from + 128), d = _mm512_loadu_si512(from + 192);
        _mm512_stream_si512(reinterpret_cast<__m512i *>(to), a);
        _mm512_stream_si512(reinterpret_cast<__m512i *>(to + 64), b);
        _mm512_stream_si512(reinterpret_cast<__m512i *>(to + 128), c);
        _mm512_stream_si512(reinterpret_cast<__m512i *>(to + 192), d);
    }
    memcpy(to, from, nbytes);
    _mm_sfence();
}
#endif

void copy(char *to, const char *from, int64_t nbytes) {
#if defined(__x86_64__)
    if (nbytes >= 4096 && __builtin_cpu_supports("avx512f")) {
        int64_t head = -reinterpret_cast<intptr_t>(to) & 63;
        memcpy(to, from, head);
        return stream(to + head, from + head, nbytes - head);
    }
#endif
    memcpy(to, from, nbytes);
}

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

bool reaches(int file, int64_t end) {
    struct stat found;
    return fstat(file, &found) == 0 && found.st_size >= end;
}

// Maps [offset, offset + nbytes), has `take(first byte)` copy from it, and says whether all of it was of the file. Not
// mapped `at_once`, pages are as they are touched; those around that are cached come with them, and no others are read.
template <typename Take> bool from_mapping(int file, int64_t offset, int64_t nbytes, bool at_once, Take take) {
    if (!reaches(file, offset + nbytes)) return false;
    int64_t ahead = offset % PAGE;
    void *made = mmap(nullptr, nbytes + ahead, PROT_READ, MAP_SHARED | (at_once ? MAP_POPULATE : 0), file, offset - ahead);
    if (made == MAP_FAILED) return false;
    if (!at_once) madvise(made, nbytes + ahead, MADV_RANDOM);
    const char *from = static_cast<const char *>(made);
    Guard mine;
    mine.from = from, mine.to = from + ahead + nbytes;
    bool is_whole = false;
    {
        Handled handled;
        if (sigsetjmp(mine.back, 1) == 0) {
            guard = &mine;
            take(from + ahead);
            is_whole = true;
        }
        guard = nullptr;
    }
    munmap(made, nbytes + ahead);
    // Behind the end of a file that was cut, the rest of its last page reads as zeros without any error.
    return is_whole && reaches(file, offset + nbytes);
}

}  // namespace

extern "C" {

// How many of `nbytes` from `offset` on seem to be in the page cache.
int64_t firstlight_cached(int file, int64_t offset, int64_t nbytes) { return cached(file, offset, nbytes); }

// Copies what the page cache holds of [offset, offset + nbytes), from its start on; how many bytes that were.
int64_t firstlight_take(int file, int64_t offset, char *target, int64_t nbytes) {
    int64_t done = 0;
    while (done < nbytes) {
        int64_t wanted = nbytes - done < WINDOW ? nbytes - done : WINDOW;
        int64_t there = cached(file, offset + done, wanted);
        char *to = target + done;
        if (there == 0 || !from_mapping(file, offset + done, there, true, [=](const char *from) { copy(to, from, there); }))
            return done;
        done += there;
        if (there < wanted) return done;
    }
    return done;
}

// Copies shares of rows, `span` of every `stride` bytes, while the page cache holds them; how many rows that were.
int64_t firstlight_take_rows(int file, int64_t offset, char *target, int64_t count, int64_t span, int64_t stride) {
    int64_t each = WINDOW / stride > 0 ? WINDOW / stride : 1;
    int64_t apart = PROBE / stride > 0 ? PROBE / stride : 1;  // rows between two probes
    int64_t done = 0;
    while (done < count) {
        int64_t rows = count - done < each ? count - done : each;
        int64_t start = offset + done * stride, nbytes = (rows - 1) * stride + span;
        bool is_there = cached(file, start, nbytes) == nbytes;
        for (int64_t row = 0; row < rows && !is_there; row += apart)
            if (cached(file, start + row * stride, span) < span) return done;
        if (!is_there && cached(file, start + nbytes - span, span) < span) return done;
        char *to = target + done * span;
        auto take = [=](const char *from) {
            for (int64_t row = 0; row < rows; row++) copy(to + row * span, from + row * stride, span);
        };
        if (!from_mapping(file, start, nbytes, false, take)) return done;
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
    for (int64_t row = 0; row < count; row++) memcpy(target + row * span, from + row * stride, span);
}

}  // extern "C"
