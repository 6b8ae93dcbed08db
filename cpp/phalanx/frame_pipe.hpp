// Frames of remote calls over a socket or a pair of rings: written and read in one call each.
//
// Nothing here waits for long. `send` and `fill` go on as long as the other side keeps up, and `look` gives it a moment
// to answer; then they return what was done, and whoever called sleeps in poll(). See src/phalanx/wire/calls.py for the
// bytes of a frame, and src/phalanx/rpc/pipe.py for the same in Python.
#pragma once

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "phalanx/lanes.hpp"
#include "phalanx/lending.hpp"
#include "phalanx/loopback.hpp"
#include "phalanx/ring.hpp"
#include "phalanx/stream_transfer.hpp"

namespace phalanx {

struct CallHeader {
    char magic[2];
    std::uint8_t kind;
    std::uint8_t zero;
    std::uint32_t head;
    std::uint64_t call;
    std::uint64_t payload;
};
static_assert(sizeof(CallHeader) == 24);

constexpr std::uint8_t kind_request = 1;  // as in src/phalanx/wire/calls.py
constexpr std::uint8_t kind_result = 16;
constexpr std::uint8_t kind_goodbye = 33;
constexpr std::uint8_t in_parts = 0x80;   // added to the kind of a frame whose payload comes in parts; only through rings
constexpr std::uint8_t in_lanes = 0x40;   // the same where it comes over lanes; only beside a socket

// What ends a pipe; other values are error numbers of the operating system.
constexpr int pipe_closed = -1;    // by the other side, in order
constexpr int pipe_severed = -2;   // as by a network that fails
constexpr int pipe_broken = -3;    // the counters of a ring are not possible
constexpr int pipe_beside = -4;    // bytes came beside a ring
constexpr int pipe_no_frame = -5;  // the bytes that were read ahead do not begin with a header
constexpr int pipe_no_part = -6;   // a part of a payload is longer than the payload, or of a kind that does not exist
constexpr int pipe_goodbye = -7;   // the other side closed before it knew that there are rings, and said so on the socket

// Whether other processes want the cores that this one would look with: seen by a look that took much too long.
struct Cores {
    static constexpr std::int64_t gap_ns = 50'000;
    static constexpr std::int64_t remembered_ns = 20'000'000;
    // The same for short frames on a socket. Two sides that sleep and wake each other take several times as much of the cores
    // for one, and both find their caches cold: as soon as the other side has had its turn, a look is worth it again.
    static constexpr std::int64_t remembered_for_sockets_ns = 2'000'000;

    static bool wanted(std::int64_t now, std::int64_t remembered = remembered_ns) noexcept {
        return now - seen_.load(std::memory_order_relaxed) < remembered;
    }
    static void want(std::int64_t now) noexcept { seen_.store(now, std::memory_order_relaxed); }

private:
    static inline Shared<std::int64_t> seen_{-remembered_ns};
};

// Whether to look before a sleep. Only where that finds something: not if what is waited for takes longer, nor if the other
// side waits for the very core that this one looks with, which no clock here tells. Whoever sleeps is answered later, too, so
// it is tried again now and then.
class Looks {
public:
    bool failed() const noexcept { return to_skip_ != 0; }  // the last one, that is
    bool worth() noexcept { return skipped_ >= to_skip_ || ++skipped_ > to_skip_; }

    void note(bool found) noexcept {
        skipped_ = 0;
        to_skip_ = found ? 0 : std::min(2 * to_skip_ + 1, most_skipped);
    }

    // It was not looked, for a reason that passes: the next look is not skipped.
    void excuse() noexcept { skipped_ = to_skip_ = std::min(to_skip_, 1U); }

private:
    static constexpr unsigned most_skipped = 31;

    unsigned to_skip_ = 0;
    unsigned skipped_ = 0;
};

// Whether a thread that waits on a socket runs on the core from which the other side, on this machine, sent last.
class SocketCore {
public:
    explicit SocketCore(int socket) noexcept : socket_(socket), is_local_(joins_one_machine(socket)) {}

    // Through loopback the kernel receives on the core that sends.
    bool shared() const noexcept {
        int core = -1;
        socklen_t size = sizeof core;
        return is_local_ && ::getsockopt(socket_, SOL_SOCKET, SO_INCOMING_CPU, &core, &size) == 0 && core == sched_getcpu();
    }

    // Before a wait, as RingHalf::part.
    void part() noexcept {
        if (shared()) parting_.look();
    }

private:
    int socket_;
    bool is_local_;
    Parting parting_;
};

class FramePipe {
public:
    // `lends`: long payloads are read where they lie, here with so many of the crew, which must outlive the pipe. The process at
    // the other end is `pid`.
    struct Lending {
        pid_t pid = 0;
        SharedCrew* crew = nullptr;
        int helpers = 0;
        bool lends = false;
    };

    FramePipe(int socket, std::size_t read_ahead) : FramePipe(socket, read_ahead, Lending{}) {}
    FramePipe(int socket, std::size_t read_ahead, const Lending& lending)
        : socket_(socket), core_(socket), lends_(lending.lends), borrower_(lending.pid, lending.crew, lending.helpers), buffer_(read_ahead) {}

    int ended() const noexcept { return ended_; }  // 0 as long as it goes on
    void end_without_frame() noexcept { ended_ = pipe_no_frame; }
    void end_with(int error) noexcept { ended_ = error; }

    // The rings of the pipe for the duration of a call; both or none.
    struct Rings {
        RingReader* in = nullptr;
        RingWriter* out = nullptr;
    };

    // As many bytes of these parts as go now. Looks for room for `patience` at a time, and then sleeps for `stay` at a time.
    std::size_t send(const Rings& rings, std::span<iovec> parts, std::int64_t patience_ns, std::int64_t stay_ns = 0) {
        const bool is_long = detail::total(parts.data(), parts.size()) > piece;
        std::size_t sent = 0;
        Looks looks;
        while (!parts.empty() && ended_ == 0) {
            std::size_t count = 0;
            if (rings.out == nullptr)
                count = put(parts);
            else if (unannounced_ == 0 || announce_rest(*rings.out))
                count = put(*rings.out, parts, piece_for(*rings.out, is_long && sent == 0));
            sent += count;
            if (count != 0) {
                drop(parts, count);
                looks = {};
                continue;
            }
            if (go_on(rings.out, looks, patience_ns)) continue;
            if (stay_ns == 0 || !sleep_for_room(rings, its_turn_ns(rings, stay_ns))) break;
            looks = {};
        }
        if (!parts.empty() && rings.out != nullptr && ended_ == 0) {
            rings.out->ask_for_byte();
            if (rings.out->room(1) != 0) {  // there is just now: somebody must try again
                rings.out->ask_for_no_byte();
                if (unannounced_ == 0 || announce_rest(*rings.out)) sent += put(*rings.out, parts, piece);
                rings.out->ask_for_byte();
            }
        }
        return sent;
    }

    std::uint64_t lent() const noexcept { return lent_; }  // bytes that the other side has read in this one's memory

    // Whether a frame with such a head goes by `send_lent` now.
    bool may_lend(const Rings& rings, std::size_t head) noexcept {
        const std::size_t wanted = sizeof(CallHeader) + head + sizeof(PayloadPart);
        return lends_ && rings.out != nullptr && fits(head) && ended_ == 0 && rings.out->room(wanted) >= wanted;
    }

    // As `send`, of a frame whose payload the other side reads where it lies. The memory is not lent any more when this
    // returns, which is at the latest when nothing was read for `lend_for`; what did not go by then is sent by `send`. The
    // header and the head are parts of their own.
    std::size_t send_lent(const Rings& rings, CallHeader& header, std::span<iovec> parts, std::int64_t patience_ns,
                          std::int64_t stay_ns, std::int64_t lend_for_ns) {
        RingWriter& ring = *rings.out;
        header.kind |= in_parts;
        unannounced_ = header.payload;
        std::size_t sent = 0;
        for (const std::size_t before = sizeof header + header.head; sent < before; parts = parts.subspan(1)) {
            ring.put(parts.front().iov_base, parts.front().iov_len);
            sent += parts.front().iov_len;
        }
        ring.publish();
        while (!parts.empty() && lends_ && ended_ == 0) {
            const std::size_t bytes = std::min<std::size_t>(parts.front().iov_len, Loan::longest);
            const bool is_short = bytes < worth_lending;
            const std::size_t count = is_short ? put_short(ring, parts.front())
                                               : lend(ring, parts.front().iov_base, bytes, patience_ns, lend_for_ns);
            sent += count;
            drop(parts, count);
            if (count == bytes || !lends_) continue;
            if (is_short) break;
            return sent;  // the other side is slow
        }
        return parts.empty() || ended_ != 0 ? sent : sent + send(rings, parts, patience_ns, stay_ns);
    }

    // Reads into the buffer of the pipe; looks for so long if nothing is there. False if nothing came.
    bool receive(const Rings& rings, std::int64_t look_ns) {
        if (start_ == stop_) {
            start_ = stop_ = 0;
        } else if (start_ > 0) {
            std::memmove(buffer_.data(), buffer_.data() + start_, stop_ - start_);
            stop_ -= start_;
            start_ = 0;
        }
        const std::int64_t remembered_ns = rings.in == nullptr ? Cores::remembered_for_sockets_ns : Cores::remembered_ns;
        Looks looks;
        for (;;) {
            const std::size_t count = take(rings, buffer_.data() + stop_, buffer_.size() - stop_);
            if (count != 0) {
                stop_ += count;
                look_for_frame();
                return true;
            }
            if (ended_ != 0) return false;
            if (!go_on(rings.in, looks, look_ns, remembered_ns)) return false;
        }
    }

    // The header at the front of the buffer, and whether all of its frame's head is there; null if not even the header is.
    const CallHeader* front(bool& whole) noexcept {
        if (stop_ - start_ < sizeof header_) return nullptr;
        std::memcpy(&header_, buffer_.data() + start_, sizeof header_);
        whole = stop_ - start_ - sizeof header_ >= header_.head;
        return &header_;
    }

    bool fits(std::size_t head) const noexcept { return head + sizeof header_ <= buffer_.size(); }
    const char* head() const noexcept { return buffer_.data() + start_ + sizeof header_; }
    void skip(std::size_t bytes) noexcept {
        start_ += bytes;
        look_for_frame();
    }

    // The payload that follows comes in parts.
    void begin_parts(std::size_t payload) noexcept { parts_left_ = payload; }

    // The payload that follows comes over lanes.
    void begin_lanes(std::shared_ptr<Lanes> lanes, std::size_t payload) noexcept {
        laned_ = std::move(lanes);
        laned_->begin(payload);
        borrows_.store(true, std::memory_order_relaxed);
    }

    // As `fill`, of such a payload; waits for more for `patience`. As long as it is not complete, `has_frame` is true: what
    // polls the socket does not see the lanes.
    bool on_lanes() const noexcept { return laned_ != nullptr; }
    std::size_t fill_from_lanes(char* to, std::size_t size, int patience_ms) {
        int ended = 0;
        const std::size_t count = laned_->fill(to, size, patience_ms, ended);
        if (ended != 0) ended_ = ended == lane_closed ? pipe_closed : ended;
        if (!laned_->coming() || ended != 0) drop_lanes();
        return count;
    }
    void drop_lanes() noexcept {
        if (laned_ != nullptr) borrows_.store(false, std::memory_order_relaxed);
        laned_.reset();
    }

    // Fills memory with what follows; looks for more for `patience` at a time. Returns how many bytes came.
    std::size_t fill(const Rings& rings, char* to, std::size_t size, std::int64_t patience_ns) {
        if (parts_left_ == 0) return fill_plain(rings, to, size, patience_ns);
        std::size_t filled = 0;
        while (filled < std::min(size, parts_left_) && ended_ == 0) {
            if (part_left_ == 0) {
                if (!begin_part(rings, patience_ns)) break;
                continue;
            }
            const std::size_t wanted = std::min(size - filled, part_left_);
            const std::size_t count = part_.lent != 0 ? borrow(rings, to + filled, wanted)
                                                      : fill_plain(rings, to + filled, wanted, patience_ns);
            filled += count;
            part_left_ -= count;
            borrows_.store(part_left_ != 0 && part_.lent != 0, std::memory_order_relaxed);
            if (count == 0 && part_left_ != 0) break;
        }
        parts_left_ -= filled;
        return filled;
    }

    std::size_t fill_plain(const Rings& rings, char* to, std::size_t size, std::int64_t patience_ns) {
        std::size_t filled = std::min(size, stop_ - start_);
        jitter::copy(to, buffer_.data() + start_, filled);
        skip(filled);
        Looks looks;
        while (filled < size && ended_ == 0) {
            const std::size_t count = take(rings, to + filled, size - filled);
            filled += count;
            if (count != 0) looks = {};
            if (count == 0 && !go_on(rings.in, looks, patience_ns)) break;
        }
        return filled;
    }

    // Before a wait for what comes: whether a look for it would keep the other side from the core that it needs. Moves to
    // another core now and then if so. A socket is asked only where looks have failed: that costs a system call.
    bool shares_core(const Rings& rings, bool looks_failed) noexcept {
        if (rings.in != nullptr) return !parted(*rings.in);
        if (!looks_failed) return false;
        core_.part();
        return core_.shared();
    }

    // Says that this side will sleep in poll(): a byte on the socket then tells of bytes in the ring. False if there are
    // some already, or the pipe has ended.
    bool may_sleep(const Rings& rings) noexcept {
        if (has_frame() || ended_ != 0) return false;
        if (rings.in == nullptr) return true;
        rings.in->ask_for_byte();
        return !rings.in->has_bytes() && !rings.in->severed() && !socket_ended_;
    }

    // poll() has found something on the socket. Beside rings, it merely wakes: only zeros are sent there, but for the goodbye
    // of a side that has not read yet that this one could open its ring.
    void woken(const Rings& rings) noexcept {
        if (rings.in == nullptr) return;
        char bytes[256];
        for (;;) {
            const ssize_t count = ::recv(socket_, bytes, sizeof bytes, MSG_DONTWAIT);
            if (count < 0) {
                if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) socket_ended_ = true;
                return;
            }
            if (count == 0) {
                socket_ended_ = true;
                return;
            }
            const std::span<const char> found(bytes, static_cast<std::size_t>(count));
            if (std::any_of(found.begin(), found.end(), [](char byte) { return byte != 0; })) {
                ended_ = is_goodbye(found) ? pipe_goodbye : pipe_beside;
            }
            if (count < static_cast<ssize_t>(sizeof bytes)) return;
        }
    }

    // What is read ahead and not yet looked at.
    std::span<const char> ahead() const noexcept { return {buffer_.data() + start_, stop_ - start_}; }

    // Whether there is a frame to give without reading: all of its head, or the header of one whose head is too long for
    // the buffer. A part of a frame does not count, as only the other side can send the rest, unless this side may read it
    // where it lies. From any thread.
    bool has_frame() const noexcept {
        return has_frame_.load(std::memory_order_relaxed) || borrows_.load(std::memory_order_relaxed);
    }

private:
    static constexpr std::size_t piece = 64 << 10;       // what is copied at a time, so that the other side goes on meanwhile
    static constexpr std::size_t first_piece = 4 << 10;  // of what is long, the head: the other side makes room for the payload

    static constexpr std::int64_t turn_ns = 4'000'000;   // about what the kernel gives to one thread while others wait

    static constexpr std::size_t worth_lending = 64 << 10;  // of one array in a payload

    // What is copied at a time. All of it where the two sides share a core and take turns anyway: the fewer, the better.
    static std::size_t piece_for(const RingHalf& ring, bool first) noexcept {
        if (ring.shares_core()) return SIZE_MAX;
        return first ? first_piece : piece;
    }

    // Says that all the rest of a payload follows. False if there is no room to say so.
    bool announce_rest(RingWriter& ring) noexcept {
        const PayloadPart part{.lent = 0, .number = 0, .bytes = unannounced_, .address = 0, .proof_at = 0, .proof = {}};
        if (!announce(ring, part)) return false;
        unannounced_ = 0;
        return true;
    }

    bool announce(RingWriter& ring, const PayloadPart& part) noexcept {
        if (ring.room(sizeof part) < sizeof part) return false;
        ring.put(&part, sizeof part);
        return true;
    }

    // Lends memory, and returns how many bytes the other side has read.
    std::size_t lend(RingWriter& ring, const void* memory, std::size_t bytes, std::int64_t look_ns, std::int64_t stay_ns) {
        if (ring.room(sizeof(PayloadPart)) < sizeof(PayloadPart)) return 0;
        const auto part = lender_.offer(ring, memory, bytes);
        if (!part) {
            lends_ = false;
            return 0;
        }
        announce(ring, *part);
        ring.publish();
        const std::size_t count = lender_.wait(ring, bytes, Cores::wanted(monotonic_ns()) ? 0 : look_ns, stay_ns);
        if (lender_.broken()) ended_ = pipe_broken;
        lends_ = lends_ && !lender_.refused();
        unannounced_ -= count;
        lent_ += count;
        return count;
    }

    // An array that is not worth lending: all of it, or nothing where there is no room for all of it.
    std::size_t put_short(RingWriter& ring, const iovec& memory) noexcept {
        const PayloadPart part{.lent = 0, .number = 0, .bytes = memory.iov_len, .address = 0, .proof_at = 0, .proof = {}};
        const std::size_t wanted = sizeof part + memory.iov_len;
        if (ring.room(wanted) < wanted) return 0;
        announce(ring, part);
        ring.put(memory.iov_base, memory.iov_len);
        ring.publish();
        unannounced_ -= memory.iov_len;
        return memory.iov_len;
    }

    // Takes what comes before the next bytes of a payload. False if it is not there yet.
    bool begin_part(const Rings& rings, std::int64_t patience_ns) {
        part_got_ += fill_plain(rings, reinterpret_cast<char*>(&part_) + part_got_, sizeof part_ - part_got_, patience_ns);
        if (part_got_ < sizeof part_) return false;
        part_got_ = 0;
        if (part_.lent > 1 || part_.bytes == 0 || part_.bytes > parts_left_) ended_ = pipe_no_part;
        if (ended_ == 0) part_left_ = part_.bytes;
        return ended_ == 0;
    }

    // Reads of the other side's memory. If it cannot, the part is over, and the rest comes in another one.
    std::size_t borrow(const Rings& rings, char* to, std::size_t bytes) {
        auto* memory = reinterpret_cast<std::byte*>(to);
        const std::size_t count = borrower_.read(*rings.in, part_, part_.bytes - part_left_, memory, bytes, true);
        if (count == 0) part_left_ = 0;
        return count;
    }

    static bool is_goodbye(std::span<const char> bytes) noexcept {
        constexpr CallHeader goodbye{.magic = {'P', 'C'}, .kind = kind_goodbye, .zero = 0, .head = 0, .call = 0, .payload = 0};
        return bytes.size() == sizeof goodbye && std::memcmp(bytes.data(), &goodbye, sizeof goodbye) == 0;
    }

    // Notes whether the buffer begins with a frame. In a header of its own: `front` has lent `header_` to the caller.
    void look_for_frame() noexcept {
        CallHeader header;
        bool found = stop_ - start_ >= sizeof header;
        if (found) {
            std::memcpy(&header, buffer_.data() + start_, sizeof header);
            const bool valid = header.magic[0] == 'P' && header.magic[1] == 'C' && header.zero == 0;
            const bool whole = stop_ - start_ - sizeof header >= header.head;
            found = whole || !valid || !fits(header.head);
        }
        has_frame_.store(found, std::memory_order_relaxed);
    }

    // Before a wait: whether this thread and the other side have a core each.
    static bool parted(RingHalf& ring) noexcept {
        ring.part();
        return !ring.shares_core();
    }

    // The first and the last look at what does not come.
    struct Looks {
        std::int64_t since = 0;
        std::int64_t last = 0;
    };

    // Whether to look again. Not if the other side wants this core, or others do: who is woken gets one sooner than who has
    // used it up.
    static bool go_on(RingHalf* ring, Looks& looks, std::int64_t patience_ns,
                      std::int64_t remembered_ns = Cores::remembered_ns) noexcept {
        if (patience_ns == 0) return false;
        const std::int64_t now = monotonic_ns();
        if (looks.since == 0) {
            looks.since = now;
            if (ring != nullptr && !parted(*ring)) return false;
            if (Cores::wanted(now, remembered_ns)) return false;
        } else if (now - looks.last > Cores::gap_ns) {
            Cores::want(now);
            return false;
        }
        looks.last = now;
        relax();
        return now - looks.since < patience_ns;
    }

    // How long to sleep for the other side: also until it has had its turn, where it waits for a core.
    static std::int64_t its_turn_ns(const Rings& rings, std::int64_t stay_ns) noexcept {
        const bool waits = (rings.out != nullptr && rings.out->shares_core()) || Cores::wanted(monotonic_ns());
        return waits ? std::max(stay_ns, turn_ns) : stay_ns;
    }

    // Sleeps until the other side has made room. False if it has not for so long, or is gone.
    bool sleep_for_room(const Rings& rings, std::int64_t longest_ns) const noexcept {
        if (rings.out == nullptr) {
            pollfd polled{socket_, POLLOUT, 0};
            const timespec span{static_cast<time_t>(longest_ns / 1'000'000'000), static_cast<long>(longest_ns % 1'000'000'000)};
            return ::ppoll(&polled, 1, &span, nullptr) == 1;
        }
        RingWriter& ring = *rings.out;
        static const Shared<std::uint32_t> never{0};
        const Bound bound{.deadline_ns = monotonic_ns() + longest_ns, .aborted = &never};
        const auto over = [&] { return ring.room(1) != 0 || ring.broken() || ring.other_closed(); };
        return detail::wait_asleep(ring.bell(), bound, over) == Outcome::done && !ring.other_closed();
    }

    static void drop(std::span<iovec>& parts, std::size_t count) noexcept {
        while (count != 0) {
            iovec& first = parts.front();
            const std::size_t taken = std::min(count, first.iov_len);
            first.iov_base = static_cast<char*>(first.iov_base) + taken;
            first.iov_len -= taken;
            count -= taken;
            if (first.iov_len == 0) parts = parts.subspan(1);
        }
        while (!parts.empty() && parts.front().iov_len == 0) parts = parts.subspan(1);
    }

    std::size_t put(RingWriter& ring, std::span<const iovec> parts, std::size_t most) {
        std::size_t total = 0;
        for (const iovec& part : parts) {
            const std::size_t wanted = std::min(part.iov_len, most - total);
            const std::size_t count = std::min(wanted, ring.room(wanted));
            ring.put(part.iov_base, count);
            total += count;
            if (count < part.iov_len) break;
        }
        if (ring.broken()) ended_ = pipe_broken;
        if (ring.severed()) ended_ = pipe_severed;
        if (total != 0) ring.publish();
        return total;
    }

    std::size_t put(std::span<iovec> parts) {
        const ssize_t count = send_parts(socket_, parts.data(), std::min<std::size_t>(parts.size(), 64));
        if (count >= 0) return static_cast<std::size_t>(count);
        if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) ended_ = errno;
        return 0;
    }

    std::size_t take(const Rings& rings, char* to, std::size_t size) {
        if (rings.in != nullptr) {
            RingReader& ring = *rings.in;
            const std::size_t most = std::min(size, piece_for(ring, false));
            const std::size_t count = std::min(ring.available(most), most);
            if (count != 0) {
                ring.peek(to, count);
                ring.skip(count);
                ring.publish();
            } else if (ring.severed()) {
                ended_ = pipe_severed;
            } else if (ring.broken()) {
                ended_ = pipe_broken;
            } else if (socket_ended_ || (ring.other_closed() && ring.available(most) == 0)) {
                // Not only by the socket: whoever looks at several rings sees this sign first, and would look for ever.
                // The second look at the ring is for what was written just before its end.
                ended_ = pipe_closed;
            }
            return count;
        }
        const ssize_t count = ::recv(socket_, to, size, MSG_DONTWAIT);
        if (count > 0) return static_cast<std::size_t>(count);
        if (count == 0)
            ended_ = pipe_closed;
        else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
            ended_ = errno;
        return 0;
    }

    int socket_;
    SocketCore core_;
    std::atomic<int> ended_ = 0;  // by whoever reads or writes
    // Of the sender.
    bool lends_;
    Lender lender_;
    std::uint64_t lent_ = 0;
    std::size_t unannounced_ = 0;  // bytes of a payload in parts that are in none yet
    // Of the receiver.
    Borrower borrower_;
    std::size_t parts_left_ = 0;  // bytes to come of a payload in parts
    PayloadPart part_{};
    std::size_t part_got_ = 0;   // bytes of `part_` itself that have come
    std::size_t part_left_ = 0;  // bytes that it is still to give
    std::atomic<bool> borrows_{false};
    std::shared_ptr<Lanes> laned_;  // over which the payload at hand comes
    std::atomic<bool> socket_ended_ = false;  // of a pipe with rings: what is in them is still to be read
    std::vector<char> buffer_;
    std::size_t start_ = 0;
    std::size_t stop_ = 0;
    CallHeader header_{};
    std::atomic<bool> has_frame_{false};
};

}  // namespace phalanx
