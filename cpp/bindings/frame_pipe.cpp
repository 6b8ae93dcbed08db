// The pipes of remote calls for Python, and a look at several of them at once.

#include "phalanx/frame_pipe.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "buffer.hpp"
#include "event_bell.hpp"
#include "gil.hpp"
#include "mapped_ring.hpp"
#include "module.hpp"
#include "python_lock.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

constexpr std::int64_t patience_ns = 50'000;  // for the other side to keep up with a long payload

// How long a sender sleeps for an other side that does not keep up. What it does not send it has to copy aside, so it waits
// about as long as that would take: most often, the other side only has to wake up.
std::int64_t worth_staying_ns(std::size_t bytes) { return static_cast<std::int64_t>(std::min<std::size_t>(bytes / 4, 20'000'000)); }

constexpr std::size_t worth_announcing = 256 << 10;  // bytes of a payload that take longer to copy than a head to be read

constexpr int lanes_wait_ms = 20;  // for lanes on which nothing comes, before a reader looks whether it should do something else

constexpr std::int64_t longest_look_ns = 1'000'000;  // longer than usual: the other side has a long payload to read first

// Sleeps for so many seconds at most. A signal ends it: its handler runs in Python.
int poll_for(pollfd* polled, nfds_t count, double seconds) {
    const auto ns = static_cast<std::int64_t>(std::min(seconds, 1e6) * 1e9);
    const timespec span{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
    return ::ppoll(polled, count, &span, nullptr);
}

double seconds_now() { return static_cast<double>(monotonic_ns()) * 1e-9; }
std::int64_t to_ns(double seconds) { return static_cast<std::int64_t>(seconds * 1e9); }

// What `post` has sent of a frame.
constexpr int post_nothing = 0;
constexpr int post_all = 1;
constexpr int post_part = 2;

// One end of a connection. One thread may read while another writes; the GIL guards the rest.
class Pipe {
public:
    Pipe(int socket, nb::object in, nb::object out, std::size_t read_ahead, std::uint64_t lend_from, double lend_for, int pid,
         SharedCrew* crew, int helpers)
        : in_object_(std::move(in)),
          out_object_(std::move(out)),
          in_(in_object_.is_none() ? nullptr : nb::cast<RingIn*>(in_object_)),
          out_(out_object_.is_none() ? nullptr : nb::cast<RingOut*>(out_object_)),
          socket_(socket),
          lend_from_(lend_from),
          lend_for_ns_(to_ns(lend_for)),
          pipe_(socket, read_ahead, {.pid = pid, .crew = crew, .helpers = helpers, .lends = lend_from != 0}) {}

    int ended() const noexcept { return pipe_.ended(); }
    RingIn* ring() const noexcept { return in_; }
    int socket() const noexcept { return socket_; }
    bool has_frame() const noexcept { return pipe_.has_frame(); }
    bool rings_closed() const noexcept {
        return (in_ != nullptr && in_->half() == nullptr) || (out_ != nullptr && out_->half() == nullptr);
    }

    // How many bytes of a frame went. If not all did, nothing else may until `send_rest` has gone on with it.
    std::size_t send(int kind, std::uint64_t call, nb::bytes head, nb::sequence buffers, std::uint64_t payload) {
        const std::size_t count = send_frame(kind, call, head, buffers, payload);
        midway_ = count != 0 && count != sizeof(CallHeader) + head.size() + payload;
        return count;
    }
    bool midway() const noexcept { return midway_; }

    // Sends what was kept back. False if a part of it does not go now; it is still there.
    bool send_held() {
        if (held_.empty()) return true;
        iovec part{held_.data(), held_.size()};
        const std::uint64_t before = written_;
        held_.erase(held_.begin(), held_.begin() + static_cast<std::ptrdiff_t>(write({&part, 1}, held_.size())));
        written_ = before;  // what was kept back counts as never written
        if (!held_.empty()) return false;
        held_frames_ = 0;
        return true;
    }

    // What was kept back, for whoever sends it later. It counts as written here, so that an interrupt is seen in between.
    nb::bytes take_held() {
        nb::bytes taken(held_.data(), held_.size());
        midway_ = midway_ || !held_.empty();  // until it is in the queue, and goes on from there
        written_ += held_.size();
        held_.clear();
        held_frames_ = 0;
        return taken;
    }

    std::size_t held() const noexcept { return held_frames_; }

    // How many bytes of what is left of a frame went.
    std::size_t send_rest(nb::sequence buffers) {
        midway_ = false;
        std::vector<iovec> parts;
        const Kept kept(parts, buffers);
        return write(parts, detail::total(parts.data(), parts.size()));
    }

    // The frames that are there, each as (kind, call, head, payload, length of the head). If there is none, looks for so long, and then sleeps
    // until something comes, there is room to write (if that is wanted), or the waker is set. After a frame with
    // a payload `fill` is to be called. A head that is too long for the buffer is None and comes like a payload. Bytes that are no header end the pipe, once the frames before them are taken.
    nb::list pull(double look, std::size_t most, double wait, int waker, bool writes) {
        nb::list frames;
        std::optional<RingIn::Stay> stay;
        if (in_ != nullptr) stay.emplace(*in_);
        const FramePipe::Rings rings = open_rings();
        bool received = false;
        while (frames.size() < most) {
            bool whole = false;
            const CallHeader* found = pipe_.front(whole);
            if (found != nullptr && (found->magic[0] != 'P' || found->magic[1] != 'C' || found->zero != 0)) {
                if (frames.size() == 0) pipe_.end_without_frame();
                break;
            }
            if (found != nullptr && !whole && !pipe_.fits(found->head)) {
                pipe_.skip(sizeof *found);
                ++taken_;
                owed_ = found->head + found->payload;
                frames.append(nb::make_tuple(found->kind, found->call, nb::none(), found->payload, found->head));
                break;
            }
            if (found != nullptr && whole) {
                nb::bytes head(pipe_.head(), found->head);
                pipe_.skip(sizeof *found + found->head);
                ++taken_;
                std::uint8_t kind = found->kind;
                if ((kind & in_parts) != 0 && in_ != nullptr && found->payload != 0) {
                    kind &= static_cast<std::uint8_t>(~in_parts);
                    pipe_.begin_parts(found->payload);
                }
                if ((kind & in_lanes) != 0 && lanes_ != nullptr && found->payload != 0) {
                    kind &= static_cast<std::uint8_t>(~in_lanes);
                    pipe_.begin_lanes(lanes_, found->payload);
                }
                owed_ = found->payload;
                frames.append(nb::make_tuple(kind, found->call, head, found->payload, found->head));
                if (found->payload != 0) break;
                continue;
            }
            if (received || frames.size() != 0 || rings_closed()) break;
            received = true;
            const bool came = pipe_.receive(rings, 0) || come_later(rings, look, wait, waker, writes);
            if (!came) break;
        }
        return frames;
    }

    // The head of the result of this call, if that is the next frame, or becomes it while this looks and then sleeps, as
    // `pull` does. Else None, and what came is for `pull`. What is taken here counts as never taken: no interrupt can come before its only taker has it.
    nb::object answer(std::uint64_t call, double look, double wait, int waker) {
        const CallHeader* found = next_plain(kind_result, call, look, wait, waker);
        return found != nullptr ? nb::object(take_head(*found)) : nb::none();
    }

    // The locks of whoever reads and whoever writes, and the queue of what waits to be written: for the four methods below,
    // which take the locks themselves. No signal handler of Python runs between that and what they do.
    void guard(nb::object moving, nb::object sending, nb::object unsent) {
        moving_.emplace(std::move(moving));
        sending_.emplace(std::move(sending));
        unsent_ = std::move(unsent);
    }

    // The end of the link: the socket may soon be another one's.
    void shut() noexcept { closed_ = true; }

    // Sends a frame without a payload, and what was kept back, if nothing stands in its way: 0 if something does, and nothing
    // of it was sent. If not all of it goes, the rest is kept back. What is sent here counts as never written.
    int post(int kind, std::uint64_t call, nb::bytes head) {
        const std::size_t total = sizeof(CallHeader) + head.size();
        if (!sending_ || total >= worth_releasing) return post_nothing;
        const HeldLock sending(*sending_);
        if (!sending.taken() || !may_write()) return post_nothing;
        CallHeader header = plain_header(kind, call, head);
        last_payload_ = 0;
        sent_on_lanes_ = false;
        std::size_t count = 0;
        held_.reserve(held_.size() + total);  // once a part is gone, nothing may fail
        if (held_frames_ == 0) {
            iovec parts[] = {{&header, sizeof header}, {const_cast<char*>(head.c_str()), head.size()}};
            const std::uint64_t before = written_;
            count = write({parts, head.size() != 0 ? 2U : 1U}, total);
            written_ = before;
            if (count == 0 || count == total) return count == 0 ? post_nothing : post_all;
        }
        keep_back(header, head);
        ++held_frames_;
        if (count == 0) return send_held() ? post_all : post_part;
        held_.erase(held_.begin(), held_.begin() + static_cast<std::ptrdiff_t>(count));
        return post_part;
    }

    // Keeps a frame without a payload back, unless so many are, or something stands in its way: the next one takes it along.
    bool hold(int kind, std::uint64_t call, nb::bytes head, std::size_t most) {
        if (!sending_ || held_frames_ >= most) return false;
        const HeldLock sending(*sending_);
        if (!sending.taken() || !may_write()) return false;
        keep_back(plain_header(kind, call, head), head);
        ++held_frames_;
        return true;
    }

    // Sends a request by `post`, and waits for its answer as `answer` does, until that moment: its head, or None if it does not
    // come so, or `wake` was called. False if nothing was sent.
    nb::object exchange(std::uint64_t call, nb::bytes head, double look, double until) {
        if (!moving_) return nb::bool_(false);
        const HeldLock moving(*moving_);
        if (!moving.taken() || closed_ || owed_ != 0) return nb::bool_(false);
        const EventBell::Heard heard(bell_);  // before the queue is looked at: whoever adds to it after that rings
        const int posted = post(kind_request, call, head);
        if (posted != post_all) return posted == post_nothing ? nb::object(nb::bool_(false)) : nb::none();
        return answer(call, look, bell_.fd() < 0 ? 0 : std::max(0.0, until - seconds_now()), bell_.fd());
    }

    // Ends the wait of an `exchange`, if there is one.
    void wake() noexcept { bell_.ring(); }

    // Number and head of the request that is the next frame, and the only one that is there; the rest as `answer`.
    nb::object request(double look, double wait, int waker) {
        if (!moving_) return nb::none();
        const HeldLock moving(*moving_);
        if (!moving.taken() || closed_ || owed_ != 0) return nb::none();
        const CallHeader* found = next_plain(kind_request, 0, look, wait, waker);
        if (found == nullptr || found->call == 0 || pipe_.ahead().size() != sizeof *found + found->head) return nb::none();
        nb::bytes head = take_head(*found);
        return nb::make_tuple(found->call, head);
    }

    // Until something comes, there is room to write (if that is wanted), or the waker is set.
    void wait(double seconds, int waker, bool writes) {
        std::optional<RingIn::Stay> stay;
        if (in_ != nullptr) stay.emplace(*in_);
        const FramePipe::Rings rings = open_rings();
        const WithoutGil released;
        if (pipe_.may_sleep(rings)) sleep(rings, seconds, waker, writes);
    }

    // For a look at several pipes at once.
    bool may_sleep() noexcept { return pipe_.may_sleep(open_rings()); }
    void woken() noexcept { pipe_.woken(open_rings()); }

    // Fills memory with what follows. If it does not come, sleeps, for so many seconds in all and until the waker is set.
    std::size_t fill(nb::handle view, double wait, int waker) {
        std::optional<RingIn::Stay> stay;
        if (in_ != nullptr) stay.emplace(*in_);
        const FramePipe::Rings rings = open_rings();
        if (rings_closed()) return 0;
        const Buffer buffer(view, PyBUF_WRITABLE);
        auto* to = reinterpret_cast<char*>(buffer.data());
        std::size_t count = 0;
        if (pipe_.on_lanes()) {
            const WithoutGil released;
            count = pipe_.fill_from_lanes(to, buffer.bytes(), wait > 0 ? lanes_wait_ms : 1);
        } else if (buffer.bytes() < worth_releasing) {
            count = pipe_.fill(rings, to, buffer.bytes(), 0);
        } else {
            const WithoutGil released;
            count = pipe_.fill(rings, to, buffer.bytes(), patience_ns);
            const double end = wait > 0 ? seconds_now() + wait : 0;
            while (count < buffer.bytes() && wait > 0 && pipe_.ended() == 0) {
                if (pipe_.may_sleep(rings)) sleep(rings, wait, waker, false);
                const std::size_t more = pipe_.fill(rings, to + count, buffer.bytes() - count, patience_ns);
                if (more == 0) break;  // the time is over, or the waker is set
                count += more;
                wait = end - seconds_now();
            }
        }
        taken_ += count;
        owed_ -= std::min<std::uint64_t>(count, owed_);
        return count;
    }

    // How many bytes were ever written, and bytes and frames taken out: an interrupt may come between a call and whoever notes its result.
    std::uint64_t written() const noexcept { return written_; }
    std::uint64_t taken() const noexcept { return taken_; }

    // How many payloads were offered to be read where they lie, and how many bytes of them were.
    std::uint64_t loans() const noexcept { return loans_; }
    std::uint64_t lent() const noexcept { return pipe_.lent(); }

    // Payloads may come over these sockets from now on, which are this object's. They are sent there from `use_lanes` on,
    // if they have so many bytes.
    void open_lanes(const std::vector<int>& sockets) { lanes_ = std::make_shared<Lanes>(sockets); }
    void use_lanes(std::uint64_t from) {
        lanes_from_ = from;
        sends_on_lanes_ = lanes_ != nullptr;
    }
    void sever_lanes() {
        sends_on_lanes_ = false;
        if (lanes_ != nullptr) lanes_->sever();
    }
    // Only while no thread reads or writes, and at the end.
    void close_lanes(bool forked) {
        closed_ = true;
        bell_.close();
        if (forked && lanes_ != nullptr) lanes_->abandon();
        sends_on_lanes_ = false;
        pipe_.drop_lanes();
        lanes_.reset();
    }
    std::uint64_t laned() const noexcept { return laned_; }

    nb::bytes ahead() const { return nb::bytes(pipe_.ahead().data(), pipe_.ahead().size()); }

private:
    // The header of the next frame once its head is there, if it is of this kind and has no payload, and belongs to this call
    // (0: to any). Looks and then sleeps for it.
    const CallHeader* next_plain(std::uint8_t kind, std::uint64_t call, double look, double wait, int waker) {
        std::optional<RingIn::Stay> stay;
        if (in_ != nullptr) stay.emplace(*in_);
        const FramePipe::Rings rings = open_rings();
        if (rings_closed()) return nullptr;
        for (int waits = 0;; ++waits) {
            bool whole = false;
            const CallHeader* found = pipe_.front(whole);
            if (found != nullptr) {
                const bool valid = found->magic[0] == 'P' && found->magic[1] == 'C' && found->zero == 0;
                const bool wanted = valid && found->kind == kind && found->payload == 0 && (call == 0 || found->call == call);
                // One that does not fit fills the buffer: there would be no room to receive more.
                if (!wanted || !pipe_.fits(found->head)) return nullptr;
            }
            if (whole) return found;
            // Where a part is here, the rest is on its way.
            if (waits > 1 || (waits == 1 && found == nullptr)) return nullptr;
            if (!pipe_.receive(rings, 0) && !come_later(rings, look, waits == 0 ? wait : 0, waker, false)) return nullptr;
        }
    }

    nb::bytes take_head(const CallHeader& found) {
        nb::bytes head(pipe_.head(), found.head);
        pipe_.skip(sizeof found + found.head);
        return head;
    }

    // How many bytes of it went.
    std::size_t send_frame(int kind, std::uint64_t call, nb::bytes head, nb::sequence buffers, std::uint64_t payload) {
        CallHeader header = plain_header(kind, call, head);
        header.payload = payload;
        last_payload_ = payload;
        sent_on_lanes_ = false;
        if (held_frames_ != 0 && payload == 0) return send_behind_held(header, head);
        if (!send_held()) return 0;
        if (payload == 0) {  // most frames: no buffers to hold
            iovec parts[] = {{&header, sizeof header}, {const_cast<char*>(head.c_str()), head.size()}};
            return write({parts, head.size() != 0 ? 2U : 1U}, sizeof header + head.size());
        }
        std::vector<iovec> parts;
        parts.push_back({&header, sizeof header});
        if (head.size() != 0) parts.push_back({const_cast<char*>(head.c_str()), head.size()});
        const Kept kept(parts, buffers);
        const std::int64_t stay_ns = worth_staying_ns(payload);
        if (out_ != nullptr && lend_from_ != 0 && payload >= lend_from_) return send_lent(header, parts, stay_ns);
        if (sends_on_lanes_ && payload >= lanes_from_ && head.size() != 0 && pipe_.fits(head.size()))
            if (const auto lanes = lanes_; may_send_on(*lanes)) return send_on_lanes(*lanes, header, parts);
        if (out_ == nullptr && payload >= worth_announcing && head.size() != 0) return announce_and_write(parts, payload, stay_ns);
        return write(parts, sizeof header + head.size() + payload, stay_ns);
    }

    // With the lock of whoever writes. Not in the middle of a frame, of which the rest is not in the queue yet: then a signal
    // handler is asking.
    bool may_write() const { return !closed_ && !midway_ && nb::len(unsent_) == 0; }

    static CallHeader plain_header(int kind, std::uint64_t call, const nb::bytes& head) noexcept {
        return {{'P', 'C'}, static_cast<std::uint8_t>(kind), 0, static_cast<std::uint32_t>(head.size()), call, 0};
    }

    void keep_back(const CallHeader& header, nb::bytes head) {
        const char* bytes = reinterpret_cast<const char*>(&header);
        held_.insert(held_.end(), bytes, bytes + sizeof header);
        held_.insert(held_.end(), head.c_str(), head.c_str() + head.size());
    }

    // A frame without a payload, in one piece with what was kept back. How many bytes of the frame itself went.
    std::size_t send_behind_held(const CallHeader& header, nb::bytes head) {
        const std::size_t own = sizeof header + head.size();
        keep_back(header, head);
        if (send_held()) {
            written_ += own;
            return own;
        }
        const std::size_t unsent = std::min(own, held_.size());
        held_.resize(held_.size() - unsent);
        if (held_.empty()) held_frames_ = 0;
        written_ += own - unsent;
        return own - unsent;
    }

    // Looks for bytes for so long, then sleeps. Without the GIL. True if some came.
    bool come_later(const FramePipe::Rings& rings, double look, double wait, int waker, bool writes) {
        if (pipe_.ended() != 0 || (look <= 0 && wait <= 0)) return false;
        // The other side needs all cores that it can get for what was sent on lanes.
        if (sent_on_lanes_) look = 0;
        const std::int64_t look_ns = to_ns(look) + std::min(worth_staying_ns(last_payload_), longest_look_ns);
        const WithoutGil released;
        bool came = false;
        if (look > 0 && pipe_.shares_core(rings, looks_.failed())) {
            looks_.excuse();
        } else if (look > 0 && looks_.worth()) {
            came = pipe_.receive(rings, look_ns);
            looks_.note(came);
        }
        if (!came && wait > 0) {
            if (pipe_.may_sleep(rings)) sleep(rings, wait, waker, writes);
            came = pipe_.receive(rings, 0);
        }
        return came;
    }

    void sleep(const FramePipe::Rings& rings, double wait, int waker, bool writes) {
        // With rings, the socket tells of room to write, too.
        const short events = static_cast<short>(POLLIN | (writes && rings.out == nullptr ? POLLOUT : 0));
        pollfd polled[] = {{socket_, events, 0}, {waker, POLLIN, 0}};
        if (poll_for(polled, 2, wait) > 0 && polled[0].revents != 0) {
            if (rings.in != nullptr) rings.in->part_woken();
            pipe_.woken(rings);
        }
    }

    // Adds the memory of buffers to the parts of a frame, and keeps it as long as this exists.
    class Kept {
    public:
        Kept(std::vector<iovec>& parts, nb::sequence buffers) {
            for (nb::handle view : buffers) {
                buffers_.emplace_back(view, PyBUF_SIMPLE);
                if (buffers_.back().bytes() != 0) parts.push_back({buffers_.back().data(), buffers_.back().bytes()});
            }
        }

    private:
        std::deque<Buffer> buffers_;
    };

    // A long payload, which the other side reads in this process's memory if that can be done.
    std::size_t send_lent(CallHeader& header, std::span<iovec> parts, std::int64_t stay_ns) {
        const RingOut::Stay stay(*out_);
        const FramePipe::Rings rings = open_rings();
        if (rings_closed()) return 0;
        std::size_t count = 0;
        {
            const WithoutGil released;
            const bool loan = pipe_.may_lend(rings, header.head) && way_.is_loan();
            const std::int64_t since = monotonic_ns();
            if (loan)
                count = pipe_.send_lent(rings, header, parts, patience_ns, stay_ns, lend_for_ns_);
            else
                count = pipe_.send(rings, parts, patience_ns, stay_ns);
            // What a ring holds was sent, but is still to be read.
            const std::size_t read = loan ? header.payload : header.payload - std::min(header.payload / 2, out_->size());
            way_.note(loan, read, monotonic_ns() - since, count == sizeof header + header.head + header.payload);
            if (loan) ++loans_;
        }
        written_ += count;
        return count;
    }

    // Not if the other side has not taken all of what was sent on them before; nor ever again if one of them has ended.
    bool may_send_on(Lanes& lanes) {
        const Lanes::State state = lanes.state();
        if (state == Lanes::State::ended) sends_on_lanes_ = false;
        return state == Lanes::State::ready;
    }

    // The header and the head as ever, and the payload on lanes. Either all of it counts as sent, or nothing.
    std::size_t send_on_lanes(Lanes& lanes, CallHeader& header, std::span<iovec> parts) {
        header.kind |= in_lanes;
        const std::size_t before = sizeof header + header.head;
        const std::size_t count = write(parts.first(2), before);
        if (count == 0) return 0;
        // A header that says so is under way: so must be the rest of it. It is short, there is always room for all of it.
        int ended = count < before ? ENOBUFS : 0;
        if (ended == 0) {
            sent_on_lanes_ = true;
            const WithoutGil released;
            ended = lanes.send(parts.subspan(2), header.payload);
        }
        if (ended != 0) {
            pipe_.end_with(ended);
            return count;
        }
        ++laned_;
        written_ += header.payload;
        return before + header.payload;
    }

    // Sends the header and the head on their own: the other side makes room for the payload while the first of it is copied
    // here, and then receives all of it where it is to lie.
    std::size_t announce_and_write(std::span<iovec> parts, std::size_t payload, std::int64_t stay_ns) {
        const std::size_t before = parts[0].iov_len + parts[1].iov_len;
        const std::size_t count = write(parts.first(2), before);
        return count < before ? count : count + write(parts.subspan(2), payload, stay_ns);
    }

    // Parts whose memory stays until this returns.
    std::size_t write(std::span<iovec> parts, std::size_t total, std::int64_t stay_ns = 0) {
        std::optional<RingOut::Stay> stay;
        if (out_ != nullptr) stay.emplace(*out_);
        const FramePipe::Rings rings = open_rings();
        if (rings_closed()) return 0;
        std::size_t count = 0;
        if (total < worth_releasing) {
            count = pipe_.send(rings, parts, 0);
        } else {
            const WithoutGil released;
            count = pipe_.send(rings, parts, patience_ns, stay_ns);
        }
        written_ += count;
        return count;
    }

    FramePipe::Rings open_rings() const noexcept {
        FramePipe::Rings rings;
        if (in_ != nullptr) rings.in = in_->half();
        if (out_ != nullptr) rings.out = out_->half();
        return rings;
    }

    std::optional<PythonLock> moving_;
    std::optional<PythonLock> sending_;
    nb::object unsent_;
    EventBell bell_;
    bool closed_ = false;
    bool midway_ = false;
    std::uint64_t owed_ = 0;  // bytes of the frame that was pulled last, for `fill`
    nb::object in_object_;
    nb::object out_object_;
    RingIn* in_;
    RingOut* out_;
    int socket_;
    std::uint64_t lend_from_;  // bytes of a payload; 0: never
    std::int64_t lend_for_ns_;
    QuickerWay way_;
    std::uint64_t loans_ = 0;
    FramePipe pipe_;
    Looks looks_;
    std::shared_ptr<Lanes> lanes_;
    bool sends_on_lanes_ = false;
    bool sent_on_lanes_ = false;  // the payload that was sent last
    std::uint64_t lanes_from_ = 0;
    std::uint64_t laned_ = 0;  // payloads that were sent on lanes
    std::vector<char> held_;  // frames that were kept back, as they are sent
    std::size_t held_frames_ = 0;
    std::uint64_t last_payload_ = 0;  // of the frame that was sent last
    std::uint64_t written_ = 0;
    std::uint64_t taken_ = 0;  // frames count as one
};

// Looks at several pipes for a short while, without the GIL: what the agent's thread does before it sleeps.
class Lookout {
public:
    explicit Lookout(nb::list pipes) {
        for (nb::handle object : pipes) {
            Pipe* pipe = nb::cast<Pipe*>(object);
            kept_.push_back(nb::borrow(object));
            pipes_.push_back(pipe);
            if (pipe->ring() == nullptr) polled_.push_back({pipe->socket(), POLLIN, 0});
        }
    }

    // The places where there is something to read; looks until there is, for so long.
    std::vector<int> look(double seconds) {
        std::vector<std::optional<RingIn::Stay>> stays(pipes_.size());
        for (std::size_t i = 0; i < pipes_.size(); ++i)
            if (pipes_[i]->ring() != nullptr) stays[i].emplace(*pipes_[i]->ring());
        bool found = any_without_poll();
        if (!found && seconds > 0 && looks_.worth()) {
            const WithoutGil released;
            std::int64_t now = monotonic_ns();
            const std::int64_t end = now + to_ns(seconds);
            while (!found && now < end && !Cores::wanted(now)) {
                for (int i = 0; i < 8 && !found; ++i) {
                    found = any_without_poll();
                    relax();
                }
                found = found || any_socket();
                const std::int64_t then = std::exchange(now, monotonic_ns());
                if (now - then > Cores::gap_ns) Cores::want(now);
            }
            looks_.note(found);
        }
        const bool socket = any_socket();
        return found || socket ? ready() : std::vector<int>{};
    }

    // Sleeps until one of the pipes has something to read, one of `writers` (their sockets) has room, or the waker is set.
    // Returns the places of the pipes that have something to read; whoever reads from them calls `woken` first.
    std::vector<int> sleep(double seconds, int waker, const std::vector<int>& writers) {
        std::vector<std::optional<RingIn::Stay>> stays(pipes_.size());
        std::vector<pollfd> polled;
        bool awake = false;
        for (std::size_t i = 0; i < pipes_.size(); ++i) {
            if (pipes_[i]->ring() != nullptr) stays[i].emplace(*pipes_[i]->ring());
            if (!pipes_[i]->may_sleep()) awake = true;
            polled.push_back({pipes_[i]->socket(), POLLIN, 0});
        }
        for (const int socket : writers) polled.push_back({socket, POLLOUT, 0});
        polled.push_back({waker, POLLIN, 0});
        {
            const WithoutGil released;
            poll_for(polled.data(), polled.size(), awake ? 0.0 : seconds);
        }
        std::vector<int> places;
        for (std::size_t i = 0; i < pipes_.size(); ++i) {
            if (polled[i].revents != 0 || has_news(pipes_[i])) places.push_back(static_cast<int>(i));
        }
        return places;
    }

private:
    static bool has_news(const Pipe* pipe) noexcept {
        if (pipe->has_frame()) return true;
        RingReader* half = pipe->ring() != nullptr ? pipe->ring()->half() : nullptr;
        return half != nullptr && (half->has_bytes() || half->other_closed());
    }

    bool any_without_poll() const noexcept { return std::any_of(pipes_.begin(), pipes_.end(), has_news); }
    bool any_socket() noexcept { return !polled_.empty() && ::poll(polled_.data(), polled_.size(), 0) > 0; }

    std::vector<int> ready() const {
        std::vector<int> places;
        std::size_t socket = 0;
        for (std::size_t i = 0; i < pipes_.size(); ++i) {
            bool news = has_news(pipes_[i]);
            if (pipes_[i]->ring() == nullptr) news = polled_[socket++].revents != 0 || news;
            if (news) places.push_back(static_cast<int>(i));
        }
        return places;
    }

    std::vector<Pipe*> pipes_;
    std::vector<nb::object> kept_;
    std::vector<pollfd> polled_;
    Looks looks_;
};

}  // namespace

void phalanx::bind_frame_pipe(nb::module_& m) {
    nb::class_<Pipe>(m, "FramePipe", "Frames of remote calls; see cpp/phalanx/frame_pipe.hpp.")
        .def(nb::init<int, nb::object, nb::object, std::size_t, std::uint64_t, double, int, SharedCrew*, int>(), nb::arg("socket"),
             nb::arg("inbound").none(), nb::arg("outbound").none(), nb::arg("read_ahead"), nb::arg("lend_from") = 0,
             nb::arg("lend_for") = 0.0, nb::arg("pid") = 0, nb::arg("crew") = nb::none(), nb::arg("helpers") = 0, nb::keep_alive<1, 9>())
        .def_prop_ro("ended", &Pipe::ended)
        .def_prop_ro("ahead", &Pipe::ahead)
        .def_prop_ro("written", &Pipe::written)
        .def_prop_ro("taken", &Pipe::taken)
        .def_prop_ro("loans", &Pipe::loans)
        .def_prop_ro("lent", &Pipe::lent)
        .def_prop_ro("laned", &Pipe::laned)
        .def("open_lanes", &Pipe::open_lanes, nb::arg("sockets"))
        .def("use_lanes", &Pipe::use_lanes, nb::arg("lanes_from"))
        .def("sever_lanes", &Pipe::sever_lanes)
        .def("close_lanes", &Pipe::close_lanes, nb::arg("forked") = false)
        .def("send", &Pipe::send, nb::arg("kind"), nb::arg("call"), nb::arg("head"), nb::arg("buffers"), nb::arg("payload"))
        .def("send_held", &Pipe::send_held)
        .def("take_held", &Pipe::take_held)
        .def_prop_ro("held", &Pipe::held)
        .def_prop_ro("midway", &Pipe::midway)
        .def("send_rest", &Pipe::send_rest, nb::arg("buffers"))
        .def("pull", &Pipe::pull, nb::arg("look"), nb::arg("most"), nb::arg("wait") = 0.0, nb::arg("waker") = -1,
             nb::arg("writes") = false)
        .def("answer", &Pipe::answer, nb::arg("call"), nb::arg("look"), nb::arg("wait") = 0.0, nb::arg("waker") = -1)
        .def("guard", &Pipe::guard, nb::arg("moving"), nb::arg("sending"), nb::arg("unsent"))
        .def("shut", &Pipe::shut)
        .def("post", &Pipe::post, nb::arg("kind"), nb::arg("call"), nb::arg("head"))
        .def("hold", &Pipe::hold, nb::arg("kind"), nb::arg("call"), nb::arg("head"), nb::arg("most"))
        .def("exchange", &Pipe::exchange, nb::arg("call"), nb::arg("head"), nb::arg("look"), nb::arg("until"))
        .def("wake", &Pipe::wake)
        .def("request", &Pipe::request, nb::arg("look"), nb::arg("wait") = 0.0, nb::arg("waker") = -1)
        .def("fill", &Pipe::fill, nb::arg("view"), nb::arg("wait") = 0.0, nb::arg("waker") = -1)
        .def("may_sleep", &Pipe::may_sleep)
        .def("woken", &Pipe::woken)
        .def("sleep", &Pipe::wait, nb::arg("seconds"), nb::arg("waker"), nb::arg("writes"));
    nb::class_<Lookout>(m, "Lookout", "Looks at several pipes for a short while.")
        .def(nb::init<nb::list>(), nb::arg("pipes"))
        .def("look", &Lookout::look, nb::arg("seconds"))
        .def("sleep", &Lookout::sleep, nb::arg("seconds"), nb::arg("waker"), nb::arg("writers"));
}
