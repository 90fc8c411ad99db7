// Reads and writes of files by threads of our own, which know nothing of Python.
//
// The bytes of an engine lie over its files in turn, 1 MiB in each. A request is cut where a file ends its turn; the
// threads of a file take pieces from the requests in the order in which they came. Direct I/O wants memory, places and
// lengths that are multiples of 4,096: what is none goes through a buffer of the thread's own, which holds one piece.
#include "../native.h"
#include "sums.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/vfs.h>
#endif

namespace {

using dsx::BLOCK;
using dsx::rounded;

constexpr int64_t PIECE = 1 << 20;
constexpr int64_t QUEUE = 1024;  // requests that may be unfinished at a time

// What a request ends with, besides the system's own numbers.
enum fault : int32_t { NONE = 0, SHORT = -1, CHECKSUM = -2 };

struct Request {
    char* data;
    int64_t bytes, offset;
    bool write;
    std::atomic<int64_t> left;  // pieces that are not done; at 0 all that precedes is final, and no thread's any more
    int32_t error;              // of the first piece that failed
    int64_t where;              // where that was
    bool awaited;               // whether somebody sleeps until it is done
};

// A request in the queue of a file: `at` is where its next piece there starts.
struct Turn {
    Request* request;
    int64_t at;
};

struct File {
    int descriptor;
    bool direct;
    std::deque<Turn> queue;
    std::condition_variable work;
    int64_t idle = 0;  // threads that sleep and were not called; if one wakes by itself, more than there are
};

struct Piece {
    char* data;
    int64_t bytes, offset;  // of all the engine's bytes
    int64_t place;          // in its file
    bool write;
};

struct Outcome {
    int32_t error;
    int64_t moved, where;  // `where` counts the engine's bytes
};

// Reads or writes all of it; returns how far it came, and why not further.
Outcome transfer(const File& file, bool write, char* data, int64_t bytes, int64_t place) {
    int64_t done = 0;
    while (done < bytes) {
        const ssize_t moved = write ? pwrite(file.descriptor, data + done, size_t(bytes - done), off_t(place + done))
                                    : pread(file.descriptor, data + done, size_t(bytes - done), off_t(place + done));
        // direct I/O that was broken off within a block cannot go on from there
        const bool within = file.direct && done % BLOCK;
        if (moved < 0 && errno == EINTR) continue;
        if (moved == 0 || (moved < 0 && errno == EINVAL && within)) return {write ? EIO : SHORT, done, 0};
        if (moved < 0) return {errno, done, 0};
        done += moved;
    }
    return {NONE, done, 0};
}

// Memory for one piece, taken when it is first needed: a huge page where the system has them, one range to the disk.
class Bounce {
  public:
    ~Bounce() { std::free(memory); }
    char* get() {
        constexpr size_t PAGE = 2 * PIECE;
        if (memory) return static_cast<char*>(memory);
        if (posix_memalign(&memory, PAGE, PAGE)) return static_cast<char*>(memory = nullptr);
#ifdef MADV_HUGEPAGE
        madvise(memory, PAGE, MADV_HUGEPAGE);
#endif
        return static_cast<char*>(memory);
    }

  private:
    void* memory = nullptr;
};

class Engine {
  public:
    Engine(const int32_t* descriptors, const int32_t* direct, int32_t count) : files(size_t(count)) {
        for (int32_t i = 0; i < count; i++) {
            files[size_t(i)].descriptor = descriptors[i];
            files[size_t(i)].direct = direct[i];
        }
    }

    bool check(int64_t size) { return sums.start(size); }

    // Threads that take no signals: those are the interpreter's.
    void start(int32_t threads) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (File& file : files)
                for (int32_t i = 0; i < threads; i++) {
                    workers.emplace_back([this, &file] { work(file); });
                    std::lock_guard<std::mutex> lock(mutex);
                    alive++;
                }
        } catch (const std::system_error&) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    // Nothing more is read or written: what is under way ends, the rest is cancelled. Whether all threads have ended,
    // after waiting for them so long: a disk may never answer.
    bool stop(int64_t milliseconds) {
        std::unique_lock<std::mutex> lock(mutex);
        stopping = true;
        for (File& file : files) file.work.notify_all();
        room.notify_all();
        if (!gone.wait_for(lock, std::chrono::milliseconds(milliseconds), [this] { return alive == 0; })) return false;
        lock.unlock();
        for (std::thread& worker : workers) worker.join();
        workers.clear();
        return true;
    }

    int32_t submit(Request* request, int64_t milliseconds) {
        const int64_t first = request->offset / PIECE, last = (request->offset + request->bytes - 1) / PIECE;
        const int64_t turn = int64_t(files.size());
        std::unique_lock<std::mutex> lock(mutex);
        const auto free = [this] { return stopping || unfinished < QUEUE; };
        if (!room.wait_for(lock, std::chrono::milliseconds(milliseconds), free)) return EAGAIN;
        if (stopping) return ECANCELED;
        request->left = last - first + 1;
        unfinished++;
        requests++;
        for (int64_t piece = first; piece <= last && piece < first + turn; piece++) {
            File& file = files[size_t(piece % turn)];
            file.queue.push_back({request, std::max(request->offset, piece * PIECE)});
            call(file, (last - piece) / turn + 1);
        }
        return NONE;
    }

    bool wait(Request* request, int64_t milliseconds) {
        if (request->left.load(std::memory_order_acquire) == 0) return true;
        if (milliseconds == 0) return false;
        std::unique_lock<std::mutex> lock(mutex);
        request->awaited = true;
        return done.wait_for(lock, std::chrono::milliseconds(milliseconds), [&] { return request->left == 0; });
    }

    void counts(int64_t* found) {
        std::lock_guard<std::mutex> lock(mutex);
        found[0] = bytes_read, found[1] = bytes_written, found[2] = requests;
    }

  private:
    // Wakes as many threads as there are pieces, if so many sleep: waking one takes longer than all else here.
    void call(File& file, int64_t pieces) {
        for (; pieces > 0 && file.idle > 0; pieces--, file.idle--) file.work.notify_one();
    }

    void work(File& file) {
        Bounce bounce;
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            while (!stopping && file.queue.empty()) {
                file.idle++;  // again after a call that came to nothing, since somebody else was quicker
                file.work.wait(lock);
            }
            if (file.queue.empty()) break;
            Request* request = file.queue.front().request;
            const Piece piece = next(file);
            Outcome outcome{stopping ? ECANCELED : request->error, 0, piece.offset};
            if (!outcome.error) {
                lock.unlock();
                outcome = move(file, piece, bounce);
                lock.lock();
            }
            finish(request, outcome);
        }
        if (--alive == 0) gone.notify_all();
    }

    // Takes the next piece from the queue.
    Piece next(File& file) {
        Turn& turn = file.queue.front();
        const Request& request = *turn.request;
        const int64_t end = request.offset + request.bytes, at = turn.at, number = at / PIECE;
        const int64_t count = int64_t(files.size());
        turn.at = (number + count) * PIECE;
        if (turn.at >= end) file.queue.pop_front();
        return {request.data + (at - request.offset), std::min((number + 1) * PIECE, end) - at, at,
                number / count * PIECE + at % PIECE, request.write};
    }

    // A piece, all of it or up to its last whole block, from where it lies, and the rest by way of the buffer.
    Outcome move(const File& file, const Piece& piece, Bounce& bounce) {
        const bool unaligned = file.direct && reinterpret_cast<uintptr_t>(piece.data) % BLOCK;
        const int64_t straight = unaligned ? 0 : piece.bytes / BLOCK * BLOCK, rest = piece.bytes - straight;
        Outcome outcome{NONE, 0, 0};
        if (straight) outcome = blocks(file, {piece.data, straight, piece.offset, piece.place, piece.write});
        if (outcome.error || !rest) return outcome;
        char* buffer = bounce.get();
        if (!buffer) return {ENOMEM, outcome.moved, piece.offset};
        const int64_t padded = rounded(rest);
        if (piece.write) {
            std::memcpy(buffer, piece.data + straight, size_t(rest));
            std::memset(buffer + rest, 0, size_t(padded - rest));
        }
        Outcome other = blocks(file, {buffer, padded, piece.offset + straight, piece.place + straight, piece.write});
        if (!other.error && !piece.write) std::memcpy(piece.data + straight, buffer, size_t(rest));
        other.moved += outcome.moved;
        return other;
    }

    // Whole blocks, with their sums if these are kept.
    Outcome blocks(const File& file, const Piece& piece) {
        if (sums && piece.write) sums.keep(piece.data, piece.bytes, piece.offset);
        Outcome outcome = transfer(file, piece.write, piece.data, piece.bytes, piece.place);
        outcome.where = piece.offset + outcome.moved;
        if (sums && !piece.write && !outcome.error) {
            const int64_t same = sums.same(piece.data, piece.bytes, piece.offset);
            if (same < piece.bytes) return {CHECKSUM, outcome.moved, piece.offset + same};
        }
        return outcome;
    }

    void finish(Request* request, const Outcome& outcome) {
        (request->write ? bytes_written : bytes_read) += outcome.moved;
        if (outcome.error && !request->error) {
            request->error = outcome.error;
            request->where = outcome.where;
        }
        const bool awaited = request->awaited;
        if (request->left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        unfinished--;
        if (awaited) done.notify_all();
        room.notify_one();
    }

    std::vector<File> files;
    std::vector<std::thread> workers;
    dsx::Sums sums;
    std::mutex mutex;  // of all that follows, and of queues and requests
    std::condition_variable done, room, gone;
    bool stopping = false;
    int64_t alive = 0, unfinished = 0, requests = 0, bytes_read = 0, bytes_written = 0;
};

Engine* engine_of(void* engine) { return static_cast<Engine*>(engine); }

}  // namespace

// An engine over open files, each with so many threads; null if the system gives no more memory or threads.
//
// direct  for each: whether it was opened with O_DIRECT
// size    bytes in all, of which sums are kept if `checked`
DSX_API void* dsx_aio_open(const int32_t* descriptors, const int32_t* direct, int32_t count, int64_t size,
                           int32_t threads, int32_t checked) {
    try {
        auto engine = std::make_unique<Engine>(descriptors, direct, count);
        if (checked && !engine->check(size)) return nullptr;
        try {
            engine->start(threads);
        } catch (const std::system_error&) {
            engine->stop(INT32_MAX);
            return nullptr;
        }
        return engine.release();
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

// Whether the threads have ended, after waiting for them so long. Then every request is done, those that had not begun
// as cancelled; otherwise the engine must be left as it is.
DSX_API int32_t dsx_aio_stop(void* engine, int64_t milliseconds) { return engine_of(engine)->stop(milliseconds); }

// Frees an engine that was stopped, and whose requests are taken.
DSX_API void dsx_aio_free(void* engine) { delete engine_of(engine); }

// Puts a read or write of `bytes`, at least one, into the queue, and gives `request`; or returns ENOMEM, EAGAIN if the
// queue was full for so long, ECANCELED if the engine was stopped.
DSX_API int32_t dsx_aio_submit(void* engine, int32_t write, void* data, int64_t bytes, int64_t offset,
                               int64_t milliseconds, void** request) {
    char* const memory = static_cast<char*>(data);
    std::unique_ptr<Request> made(new (std::nothrow) Request{memory, bytes, offset, bool(write), {0}, 0, 0, false});
    if (!made) return ENOMEM;
    const int32_t error = engine_of(engine)->submit(made.get(), milliseconds);
    if (error == NONE) *request = made.release();
    return error;
}

// Whether a request is done, after waiting for it so long.
DSX_API int32_t dsx_aio_wait(void* engine, void* request, int64_t milliseconds) {
    return engine_of(engine)->wait(static_cast<Request*>(request), milliseconds);
}

// How a request that is done ended: 0, or an error and where that was. Frees the request.
DSX_API int32_t dsx_aio_take(void* request, int64_t* where) {
    const std::unique_ptr<Request> taken(static_cast<Request*>(request));
    *where = taken->where;
    return taken->error;
}

// Bytes read, bytes written, requests.
DSX_API void dsx_aio_counts(void* engine, int64_t* found) { engine_of(engine)->counts(found); }

// The kind of a filesystem, as the system numbers them; 0 if that is not known.
DSX_API int64_t dsx_aio_filesystem(const char* path) {
#ifdef __linux__
    struct statfs found;
    if (statfs(path, &found) == 0) return int64_t(found.f_type) & 0xffffffff;
#endif
    return 0;
}
