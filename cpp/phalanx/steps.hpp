// The steps of a schedule over TCP: what src/phalanx/group/engines/steps/run.py does, without the interpreter in between.
//
// `move` sends and receives as much as goes now, reduces what has come while it is still in the cache, and goes on to the
// next step by itself. When there is nothing to do it looks again for a while, and never sleeps: that, and whatever is not
// as expected (an end, another frame), it leaves to the caller.
#pragma once

#include <poll.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "phalanx/frame.hpp"
#include "phalanx/reduce.hpp"
#include "phalanx/stream_transfer.hpp"
#include "phalanx/wait_policy.hpp"

namespace phalanx {

constexpr std::uint8_t kind_step = 4;

// Memory of one chunk. `own` is where it lies before it is written to for the first time, if that is elsewhere.
struct Chunk {
    std::byte* memory = nullptr;
    const std::byte* own = nullptr;
    std::size_t size = 0;

    const std::byte* now() const noexcept { return own != nullptr ? own : memory; }
};

struct Recv {
    int chunk = 0;
    bool reduce = false;
    bool before = false;
    bool late = false;
};

struct Step {
    std::vector<std::pair<int, int>> sends;   // channel, chunk
    std::vector<std::pair<int, Recv>> recvs;  // channel, what
};

// Blocks of memory for pieces that are reduced, which one collective leaves to the next: what is given back to the system
// costs a page fault for each page when it is asked for again.
class ScratchPool {
public:
    using Block = std::unique_ptr<std::byte[]>;
    static constexpr std::size_t block_bytes = 256 << 10;  // stays in the cache
    static constexpr std::size_t most_blocks = 4;

    Block take() {
        const std::lock_guard<std::mutex> held(mutex_);
        if (blocks_.empty()) return std::make_unique_for_overwrite<std::byte[]>(block_bytes);
        Block block = std::move(blocks_.back());
        blocks_.pop_back();
        return block;
    }

    void give(Block block) {
        const std::lock_guard<std::mutex> held(mutex_);
        if (blocks_.size() < most_blocks) blocks_.push_back(std::move(block));
    }

private:
    std::mutex mutex_;
    std::vector<Block> blocks_ = [] {
        std::vector<Block> none;
        none.reserve(most_blocks);
        return none;
    }();
};

class Steps {
public:
    // The numbers are shared with src/phalanx/group/engines/steps/fast_path.py.
    // `hung_up`: all is done, but somebody has closed its connection.
    enum class Outcome : int { done, blocked, more, inbound_ended, outbound_ended, refused, hung_up };

    static constexpr std::size_t scratch_bytes = ScratchPool::block_bytes;  // of a piece that is reduced
    static constexpr std::size_t short_scratch = 64 << 10;   // not worth a block of the pool
    static constexpr std::size_t long_piece = 4 << 20;       // of a step that only sends or only receives
    static constexpr std::size_t slice = 64 << 20;           // bytes that are moved before the caller has a look
    static constexpr std::int64_t look_is_good_ns = 100'000;  // of a look for connections that were closed

    // `watched`: the connections whose end is looked for when all is done, one of each other rank at least. `pool`: where
    // long scratch memory comes from, if there is one.
    Steps(std::shared_ptr<const std::vector<Step>> steps, std::vector<Chunk> chunks, const std::vector<int>& out,
          const std::vector<int>& in, const std::vector<int>& watched, std::uint64_t fingerprint, Dtype dtype, Op op,
          std::shared_ptr<ScratchPool> pool = nullptr)
        : plan_(std::move(steps)),
          steps_(*plan_),
          chunks_(std::move(chunks)),
          fingerprint_(fingerprint),
          dtype_(dtype),
          op_(op),
          pool_(std::move(pool)) {
        outbound_.reserve(out.size());
        inbound_.reserve(in.size());
        for (const int fd : out) outbound_.push_back(Outbound{fd});
        for (const int fd : in) inbound_.push_back(Inbound{fd});
        for (const int fd : watched) polled_.push_back({fd, POLLRDHUP, 0});
        begin();
    }

    ~Steps() {
        for (Inbound& from : inbound_)
            if (from.pooled) pool_->give(std::move(from.scratch));
    }
    Steps(const Steps&) = delete;
    Steps& operator=(const Steps&) = delete;

    // The same steps once more, with the memory that `chunks` says by now.
    void restart(std::uint64_t fingerprint, Dtype dtype, Op op) {
        fingerprint_ = fingerprint;
        dtype_ = dtype;
        op_ = op;
        at_ = 0;
        begin();
    }

    // For `restart`: whoever changes their places keeps their sizes.
    std::vector<Chunk>& chunks() noexcept { return chunks_; }

    // Looks at the channels until there is nothing to do for as long as the wait has patience, and moves up to `piece` bytes
    // at once on each, so that sending and receiving take turns.
    Outcome move(Wait& wait, std::size_t piece) {
        std::size_t moved_bytes = 0;
        while (at_ < steps_.size()) {
            std::size_t moved = 0;
            bool sends = false, receives = false;  // something is still to be sent, or to come
            const bool one_way = steps_[at_].sends.empty() || steps_[at_].recvs.empty();
            const std::size_t most = one_way ? long_piece : piece;
            for (std::size_t i = 0; i < outbound_.size(); ++i) {
                Outbound& to = outbound_[i];
                if (to.next == to.frames.size()) continue;
                const ssize_t count = push(to, most);
                if (count < 0) return failed(Outcome::outbound_ended, i);
                moved += static_cast<std::size_t>(count);
                sends |= to.next < to.frames.size();
            }
            for (std::size_t i = 0; i < inbound_.size(); ++i) {
                Inbound& from = inbound_[i];
                if (from.next == from.frames.size()) continue;
                const ssize_t count = pull(from, most);
                if (count < 0) return failed(Outcome::inbound_ended, i);
                moved += static_cast<std::size_t>(count);
                if (refused_) return failed(Outcome::refused, i);
                receives |= from.next < from.frames.size();
            }
            if (moved > 0 && wait.waits()) wait.end(monotonic_ns());
            if (!sends && !receives) {
                end();
                continue;
            }
            moved_bytes += moved;
            if (moved == 0) {
                if (!look_again(wait, !sends)) return Outcome::blocked;
            } else if (moved_bytes >= slice) {
                return Outcome::more;
            }
        }
        wait.ended(only_receives());
        return anyone_hung_up() ? Outcome::hung_up : Outcome::done;
    }

    // Sleeps until something can be moved, but not longer than that.
    void sleep(int milliseconds) {
        wanted_.clear();
        for (std::size_t i = 0; i < inbound_.size(); ++i)
            if (receives_from(i)) wanted_.push_back({inbound_[i].fd, POLLIN, 0});
        for (std::size_t i = 0; i < outbound_.size(); ++i)
            if (sends_to(i)) wanted_.push_back({outbound_[i].fd, POLLOUT, 0});
        ::poll(wanted_.data(), wanted_.size(), milliseconds);
    }

    // Which channel has ended or brought another frame, and the error number, 0 for an orderly end.
    std::size_t where() const noexcept { return where_; }
    int error() const noexcept { return error_; }

    // Of the channel at `where`: the header of another frame, and what came behind it.
    const FrameHeader& header() const noexcept { return inbound_[where_].header; }
    std::pair<const std::byte*, std::size_t> behind() const noexcept { return {room_, behind_}; }

    bool sends_to(std::size_t i) const noexcept { return outbound_[i].next < outbound_[i].frames.size(); }
    bool receives_from(std::size_t i) const noexcept { return inbound_[i].next < inbound_[i].frames.size(); }

    // Whether a part of a frame is on the wire, so that nothing else can follow.
    bool halfway(std::size_t i) const noexcept { return outbound_[i].sent > 0; }

private:
    struct Out {
        FrameHeader header;
        const std::byte* memory;
    };
    struct Outbound {
        int fd;
        std::vector<Out> frames{};
        std::size_t next = 0;
        std::size_t sent = 0;  // of the frame, with its header
    };
    struct Inbound {
        int fd;
        std::vector<Recv> frames{};
        std::size_t next = 0;
        std::size_t got = 0;   // of the frame, with its header
        std::size_t done = 0;  // bytes of the payload that have been reduced
        FrameHeader header{};
        std::unique_ptr<std::byte[]> scratch{};
        std::size_t room = 0;  // in it
        bool pooled = false;   // whether it is a block of the pool
    };
    struct Late {
        Recv recv;
        std::unique_ptr<std::byte[]> received;
    };

    // Whether one of the connections was closed by the other side, whatever it had sent before. Steps that are done again and
    // again ask the system only now and then: a rank that was there a moment ago may be lost just after any look as well.
    bool anyone_hung_up() noexcept {
        const std::int64_t now = monotonic_ns();
        if (now - looked_ns_ < look_is_good_ns) return false;
        looked_ns_ = now;
        return ::poll(polled_.data(), polled_.size(), 0) > 0;
    }

    bool only_receives() const noexcept {
        return std::all_of(steps_.begin(), steps_.end(), [](const Step& step) { return step.sends.empty(); });
    }

    FrameHeader expected(std::size_t size) const noexcept {
        FrameHeader header;
        header.kind = kind_step;
        header.tag = fingerprint_;
        header.payload = size;
        return header;
    }

    void begin() {
        for (Outbound& to : outbound_) {
            to.frames.clear();
            to.next = 0;
        }
        for (Inbound& from : inbound_) {
            from.frames.clear();
            from.next = 0;
        }
        if (at_ == steps_.size()) return;
        for (const auto& [channel, chunk] : steps_[at_].sends)
            outbound_[channel].frames.push_back(Out{expected(chunks_[chunk].size), chunks_[chunk].now()});
        for (const auto& [channel, recv] : steps_[at_].recvs) inbound_[channel].frames.push_back(recv);
        for (Inbound& from : inbound_) prepare(from);
    }

    void end() {
        for (const Late& late : late_) {
            Chunk& chunk = chunks_[late.recv.chunk];
            combine(chunk, late.recv.before, 0, late.received.get(), chunk.size);
            chunk.own = nullptr;
        }
        late_.clear();
        ++at_;
        begin();
    }

    // Memory for the frame that comes next. Allocates, so it must not be called in the middle of a frame.
    void prepare(Inbound& from) {
        from.got = from.done = 0;
        if (from.next == from.frames.size()) return;
        const Recv& recv = from.frames[from.next];
        const std::size_t size = chunks_[recv.chunk].size;
        if (recv.late)
            late_.push_back(Late{recv, std::make_unique_for_overwrite<std::byte[]>(size)});
        else if (recv.reduce && from.room < std::min(size, scratch_bytes)) {
            from.pooled = pool_ != nullptr && size > short_scratch;
            from.room = from.pooled ? scratch_bytes : std::min(size, scratch_bytes);
            from.scratch = from.pooled ? pool_->take() : std::make_unique_for_overwrite<std::byte[]>(from.room);
        }
    }

    ssize_t push(Outbound& to, std::size_t piece) noexcept {
        iovec parts[16];
        std::size_t count = 0;
        std::size_t skip = to.sent;
        for (std::size_t i = to.next; i < to.frames.size() && count + 2 <= 16 && piece > 0; ++i) {
            Out& frame = to.frames[i];
            if (skip < sizeof frame.header)
                parts[count++] = {reinterpret_cast<std::byte*>(&frame.header) + skip, sizeof frame.header - skip};
            const std::size_t from = skip < sizeof frame.header ? 0 : skip - sizeof frame.header;
            const std::size_t length = std::min<std::size_t>(frame.header.payload - from, piece);
            if (length > 0) parts[count++] = {const_cast<std::byte*>(frame.memory) + from, length};
            piece -= length;
            skip = 0;
            if (from + length < frame.header.payload) break;
        }
        const ssize_t sent = send_parts(to.fd, parts, count);
        if (sent < 0) return later();
        to.sent += static_cast<std::size_t>(sent);
        while (to.next < to.frames.size()) {
            const std::size_t whole = sizeof(FrameHeader) + to.frames[to.next].header.payload;
            if (to.sent < whole) break;
            to.sent -= whole;
            ++to.next;
        }
        return sent;
    }

    ssize_t pull(Inbound& from, std::size_t piece) {
        const Recv& recv = from.frames[from.next];
        Chunk& chunk = chunks_[recv.chunk];
        const bool piecewise = recv.reduce && !recv.late;
        const std::size_t head = std::min(from.got, sizeof from.header);
        const std::size_t body = from.got - head;
        const std::size_t kept = piecewise ? body - from.done : 0;  // less than an element
        std::byte* const base = recv.late ? late_of(recv) : piecewise ? from.scratch.get() + kept : chunk.memory;
        room_ = piecewise ? base : base + body;
        std::size_t length = std::min(chunk.size - body, piece);
        if (piecewise) length = std::min(length, from.room - kept);
        iovec parts[2];
        std::size_t count = 0;
        if (head < sizeof from.header) parts[count++] = {reinterpret_cast<std::byte*>(&from.header) + head, sizeof from.header - head};
        if (length > 0) parts[count++] = {room_, length};
        const ssize_t got = receive_parts(from.fd, parts, count);
        if (got == 0) {
            error_ = 0;
            return -1;
        }
        if (got < 0) return later();
        from.got += static_cast<std::size_t>(got);
        if (from.got < sizeof from.header) return got;
        if (head < sizeof from.header) {
            const FrameHeader wanted = expected(chunk.size);
            if (std::memcmp(&wanted, &from.header, sizeof wanted) != 0) {
                behind_ = from.got - sizeof from.header;
                refused_ = true;
                return got;
            }
        }
        const std::size_t have = from.got - sizeof from.header;
        if (piecewise) {
            const std::size_t filled = have - from.done;
            const std::size_t whole = filled - filled % item_size(dtype_);
            combine(chunk, recv.before, from.done, from.scratch.get(), whole);
            from.done += whole;
            // An empty chunk has no scratch.
            if (filled > whole) std::memmove(from.scratch.get(), from.scratch.get() + whole, filled - whole);
        }
        if (have == chunk.size) {
            if (!recv.late) chunk.own = nullptr;
            ++from.next;
            prepare(from);
        }
        return got;
    }

    std::byte* late_of(const Recv& recv) const noexcept {
        for (const Late& late : late_)
            if (late.recv.chunk == recv.chunk) return late.received.get();
        return nullptr;  // prepare() has made one
    }

    void combine(const Chunk& chunk, bool before, std::size_t at, const std::byte* received, std::size_t bytes) noexcept {
        const std::byte* const own = chunk.now() + at;
        const std::byte* const left = before ? received : own;
        const std::byte* const right = before ? own : received;
        reduce(chunk.memory + at, left, right, bytes / item_size(dtype_), dtype_, op_);
    }

    // 0 if the call is to be repeated later, -1 if the connection has ended.
    ssize_t later() noexcept {
        error_ = errno;
        return error_ == EAGAIN || error_ == EWOULDBLOCK || error_ == EINTR ? 0 : -1;
    }

    Outcome failed(Outcome outcome, std::size_t where) noexcept {
        where_ = where;
        return outcome;
    }

    std::shared_ptr<const std::vector<Step>> plan_;
    const std::vector<Step>& steps_;
    std::size_t at_ = 0;
    std::vector<Chunk> chunks_;
    std::vector<Outbound> outbound_;
    std::vector<Inbound> inbound_;
    std::vector<Late> late_;
    std::vector<pollfd> polled_;
    std::int64_t looked_ns_ = -look_is_good_ns;
    std::vector<pollfd> wanted_;
    std::uint64_t fingerprint_;
    Dtype dtype_;
    Op op_;
    std::shared_ptr<ScratchPool> pool_;
    std::size_t where_ = 0;
    int error_ = 0;
    bool refused_ = false;
    std::byte* room_ = nullptr;
    std::size_t behind_ = 0;
};

}  // namespace phalanx
