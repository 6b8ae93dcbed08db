// The fast path of a send or receive of a NumPy array through MPI: as FastMessages does it over rings. An asynchronous receive
// is only prepared: the thread that waits for it takes its message as a synchronous one would. One that no thread waits for, and
// one that lasts, is posted the general way.
// src/phalanx/backends/mpi/protocol.py says what is sent.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <ctime>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "alarm.hpp"
#include "gil.hpp"
#include "message_calls.hpp"
#include "module.hpp"
#include "mpi_wire.hpp"
#include "phalanx/wait_policy.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

using Head = std::span<const std::byte>;

// The kind of a head, its first byte; all of them are in protocol.py.
enum class HeadWord : std::uint8_t { message = 1, offer = 2, ready = 3, drop = 4, cut = 5 };

constexpr std::size_t number_at = 25;      // in a head, after the word, the world and the lane
constexpr std::size_t sizes_bytes = 10;    // of an offer of one part: how many there are, and its length
constexpr std::size_t longest_head = 4096;  // what is longer goes the general way, which need not wait for it

template <class T>
T read_at(Head head, std::size_t at) {
    T value;
    std::memcpy(&value, head.data() + at, sizeof value);
    return value;
}

// The prepared receives of a world that no thread waits for. Its background thread, which has other `jobs`, too, posts them a
// moment later (src/phalanx/backends/mpi/progress_thread.py). With the GIL held only.
class UnattendedReceives {
public:
    // `start()` starts that thread.
    UnattendedReceives(nb::object alarm, nb::list jobs, nb::object start)
        : alarm_object_(std::move(alarm)), alarm_(*nb::cast<Alarm*>(alarm_object_)), jobs_(std::move(jobs)), start_(std::move(start)) {}

    // False if the system has no thread left: the general way says so.
    bool add() {
        try {
            if (!started_) in_interpreter([&] { return start_(); });
        } catch (const nb::python_error& error) {
            if (!error.matches(PyExc_RuntimeError)) throw;
            return false;
        }
        started_ = true;
        if (count_++ == 0) since_ = monotonic_ns();
        alarm_.arm();
        return true;
    }

    void remove() noexcept {
        if (--count_ == 0 && jobs_.size() == 0) alarm_.disarm();
    }

    // A thread waits for one of them, and most likely for the others after it: they have time until then, but not for ever.
    void attend() noexcept {
        --count_;
        if (jobs_.size() == 0) alarm_.disarm();
    }
    void attended() noexcept {
        if (count_ == 0) return;
        if (monotonic_ns() - since_ < longest_ns)
            alarm_.arm();
        else
            alarm_.hurry();
    }

    int count() const noexcept { return count_; }

private:
    nb::object alarm_object_;
    Alarm& alarm_;
    nb::list jobs_;
    nb::object start_;
    static constexpr std::int64_t longest_ns = 20'000'000;

    bool started_ = false;
    int count_ = 0;
    std::int64_t since_ = 0;  // there have been some
};

class MpiMessages : MessageCalls {
public:
    class Prepared;

    // `begins`: what the head of every short message of this lane begins with. `inbox`, `reader` and `lock` are as in
    // src/phalanx/backends/mpi; `general` goes on with what is not done here (handover.py), and `numbers` are those of the
    // messages of this rank. `members` are world ranks, by which MPI and the inbox know them. Messages of up to `whole` bytes
    // travel in their heads. `unattended` is the world's.
    MpiMessages(const MpiWire& wire, const nb::bytes& begins, int rank, const std::vector<int>& members, nb::object inbox,
                nb::object reader, nb::object lock, nb::object arrays, nb::object recorder, double timeout, std::size_t whole,
                std::size_t most, bool oversubscribed, nb::object general, nb::object numbers, nb::object unattended)
        : MessageCalls(inbox.attr("mailbox"), std::move(arrays), std::move(recorder), timeout, most),
          wire_(wire),
          begins_(begins.c_str(), begins.size()),
          gone_(inbox.attr("gone")),
          talked_(inbox.attr("talked")),
          behind_(reader.attr("behind")),
          unread_(reader.attr("unread")),
          lock_object_(std::move(lock)),
          lock_(*nb::cast<ChannelLock*>(lock_object_)),
          whole_(whole),
          policy_(oversubscribed),
          general_(std::move(general)),
          numbers_(std::move(numbers)),
          unattended_object_(std::move(unattended)),
          unattended_(*nb::cast<UnattendedReceives*>(unattended_object_)) {
        for (int i = 0; i < static_cast<int>(members.size()); ++i) {
            const int number = members[static_cast<std::size_t>(i)];
            routes_.push_back(i == rank ? Route{} : Route{number, nb::int_(number)});
        }
    }

    // Declines everything from now on.
    void close() { routes_.clear(); }

    // True: done. False: declined, nothing has happened. Otherwise (operation or None, seconds waited).
    nb::object send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout, const char* library) {
        Message message;
        Route* const found = usable(dst, message);
        if (found == nullptr || !describe(message, x, tag, timeout, false, library)) return nb::bool_(false);
        return message.array.bytes <= whole_ ? send_whole(*found, message) : send_in_two(*found, message, x);
    }

    // As `send`, of a message that travels in its head; any other is declined. It never waits.
    nb::object send_at_once(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout) {
        Message message;
        Route* const found = usable(dst, message);
        if (found == nullptr || !describe(message, x, tag, timeout, false, "numpy")) return nb::bool_(false);
        return message.array.bytes <= whole_ ? send_whole(*found, message) : nb::bool_(false);
    }

    nb::object recv(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout, const char* library) {
        Message message;
        Route* const found = usable(src, message);
        if (found == nullptr || !describe(message, out, tag, timeout, true, library)) return nb::bool_(false);
        const Turn turn(lock_);
        if (!turn.taken || !found->prepared.empty() || is_behind(*found)) return nb::bool_(false);
        look_at(*found);
        return receive(found->rank, found->number, message, out);
    }

    // A receive that is not posted yet, of a message that travels in its head; None: declined.
    nb::object prepare(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout);

private:
    static constexpr unsigned sends_between_looks = 32;
    static constexpr int held_looks = 20;
    static constexpr std::size_t worth_holding = 16 << 10;  // bytes: MPI may copy more than these while it is looked at
    static constexpr long nap_ns = 20'000;
    static constexpr int nothing = -1, give_up = -2, came = -3;

    struct Route {
        int rank = -1;  // in the world
        nb::object number{};
        bool met = false;
        unsigned sends = 0;                // since this rank has last looked at what that one has sent
        std::deque<Prepared*> prepared{};  // receives, in the order of the calls
    };

    Route* usable(nb::handle rank, Message& message) {
        Route* const found = lookup(routes_, rank, message);
        if (found == nullptr || found->rank < 0) return nullptr;
        return is_gone(*found) ? nullptr : found;
    }

    bool is_gone(const Route& route) const { return gone_.size() != 0 && gone_.contains(route.number); }

    // The other rank must hear when this one closes the group.
    void meet(Route& route) {
        if (!route.met && PySet_Add(talked_.ptr(), route.number.ptr()) != 0) throw nb::python_error();
        route.met = true;
    }

    void look_at(Route& route) {
        meet(route);
        route.sends = 0;
    }

    // Whether something has come, or is waited for, that a receive from this rank must not overtake.
    bool is_behind(const Route& route) const { return has_line() || comes_later(route.number); }

    // Whether heads have come that the general way has not looked at yet.
    bool has_line() const { return behind_.size() != 0 || PyObject_Size(unread_.ptr()) != 0; }

    // -- sending -------------------------------------------------------------------------------------------------------

    nb::object send_whole(Route& route, const Message& message) {
        // Now and then: that the other rank has closed the group is heard by the general way only.
        if (++route.sends % sends_between_looks == 0 && wire_.anything_waits()) return nb::bool_(false);
        meet(route);
        const ArrayHead& head = message.head;
        auto sending = std::make_unique<MpiRequest>(wire_, begins_.size() + head.size() + message.array.bytes);
        std::byte* const to = begin_head(*sending, HeadWord::message, 0);
        std::memcpy(to, head.data(), head.size());
        std::memcpy(to + head.size(), message.array.data, message.array.bytes);
        if (!sending->begin_head(route.rank)) return waited(nb::none(), message);
        // Some MPIs send more than a few hundred bytes only when the receiver has looked, which it may be about to do.
        bool is_sent = false;
        for (int i = 0; i < held_looks && !is_sent; ++i) is_sent = sending->test();
        if (!is_sent) {
            const nb::object peer = route.number;
            const nb::object request = given(std::move(sending));
            return waited(in_any_case([&] { return general_.attr("go_on_with_head")(peer, request); }), message);
        }
        return sent(message);
    }

    // Offers it, and sends its body when the receiver asks for it. Until then it can be taken back.
    nb::object send_in_two(Route& route, const Message& message, nb::handle x) {
        const Turn turn(lock_);
        // What has come is for the general way, and the answer would be behind it.
        if (!turn.taken || has_line() || wire_.anything_waits()) return nb::bool_(false);
        meet(route);
        const int rank = route.rank;
        const nb::object peer = route.number;  // the group may be closed meanwhile
        const nb::object number = nb::steal(PyIter_Next(numbers_.ptr()));
        if (!number.is_valid()) throw nb::python_error();
        const auto bare_number = nb::cast<std::uint64_t>(number);
        if (!say(offer_of(message, bare_number), rank)) return waited(nb::none(), message);
        std::array<std::byte, longest_head> read;
        const int bytes = await(held_looks, bound_of(message, lock_), true, [&] { return answer_of(rank); });
        Head answer;
        if (bytes >= 0 && static_cast<std::size_t>(bytes) <= read.size() && wire_.receive_head(read.data(), bytes, rank))
            answer = Head(read.data(), static_cast<std::size_t>(bytes));
        if (answers(answer, HeadWord::drop, bare_number)) return sent(message);
        if (!answers(answer, HeadWord::ready, bare_number)) {
            const nb::bytes other(answer.data(), answer.size());
            const nb::object memory = memory_of(x, message);
            return waited(in_any_case([&] { return general_.attr("go_on_offering")(peer, number, memory, other); }), message);
        }
        auto body = std::make_unique<MpiRequest>(wire_);
        if (!body->begin_body(message.array.data, message.array.bytes, rank, bare_number)) return failed("sending a message");
        if (await_body(*body, message) == came) return sent(message);
        const nb::object request = given(std::move(body)), memory = memory_of(x, message);
        return waited(in_any_case([&] { return general_.attr("go_on_sending")(peer, memory, request); }), message);
    }

    nb::object sent(const Message& message) {
        note("send", message);
        return nb::bool_(true);
    }

    std::unique_ptr<MpiRequest> offer_of(const Message& message, std::uint64_t number) const {
        const ArrayHead& head = message.head;
        auto offer = std::make_unique<MpiRequest>(wire_, begins_.size() + head.size() + sizes_bytes);
        const std::uint16_t parts = 1;
        const std::uint64_t size = message.array.bytes;
        std::byte* to = begin_head(*offer, HeadWord::offer, number);
        to = put(to, head.data(), sizeof(FrameHeader));
        to = put(to, &parts, sizeof parts);
        to = put(to, &size, sizeof size);
        put(to, head.data() + sizeof(FrameHeader), head.size() - sizeof(FrameHeader));
        return offer;
    }

    // The bytes of the next head, if it is this rank's. Another's may be that of a rank that waits for this one.
    int answer_of(int rank) const {
        if (!wire_.anything_waits()) return nothing;
        const int bytes = wire_.waiting(rank);
        return bytes >= 0 ? bytes : give_up;
    }

    bool answers(Head head, HeadWord word, std::uint64_t number) const {
        return head.size() == begins_.size() && is_ours(head, word) && read_at<std::uint64_t>(head, number_at) == number;
    }

    // -- receiving -----------------------------------------------------------------------------------------------------

    nb::object receive(int rank, const nb::object peer, const Message& message, nb::handle out) {
        std::array<std::byte, longest_head> read;
        const int bytes = await(held_looks, bound_of(message, lock_), true, [&] { return wire_.waiting(rank); });
        if (bytes < 0 || static_cast<std::size_t>(bytes) > read.size() || !wire_.receive_head(read.data(), bytes, rank))
            return waited(nb::none(), message);
        const Head head(read.data(), static_cast<std::size_t>(bytes));
        if (is_whole(head, message)) {
            std::memcpy(message.array.data, head.data() + head.size() - message.array.bytes, message.array.bytes);
            note("recv", message);
            return nb::bool_(true);
        }
        if (is_offer(head, message))
            return take_body(rank, peer, read_at<std::uint64_t>(head, number_at), message, out);
        const nb::bytes other(head.data(), head.size());
        in_any_case([&] { return general_.attr("give_back")(peer, other); });
        return waited(nb::none(), message);
    }

    bool is_whole(Head head, const Message& message) const {
        const ArrayHead& expected = message.head;
        return head.size() == begins_.size() + expected.size() + message.array.bytes && is_ours(head, HeadWord::message) &&
               std::memcmp(head.data() + begins_.size(), expected.data(), expected.size()) == 0;
    }

    // Whether the body of an offer fits: the header has its length, the description its type.
    bool is_offer(Head head, const Message& message) const {
        const ArrayHead& expected = message.head;
        const std::size_t start = begins_.size(), sizes = start + sizeof(FrameHeader);
        return head.size() == start + expected.size() + sizes_bytes && is_ours(head, HeadWord::offer) &&
               std::memcmp(head.data() + start, expected.data(), sizeof(FrameHeader)) == 0 &&
               read_at<std::uint16_t>(head, sizes) == 1 && read_at<std::uint64_t>(head, sizes + 2) == message.array.bytes &&
               std::memcmp(head.data() + sizes + sizes_bytes, expected.data() + sizeof(FrameHeader),
                           expected.size() - sizeof(FrameHeader)) == 0;
    }

    nb::object take_body(int rank, const nb::object& peer, std::uint64_t number, const Message& message, nb::handle out) {
        auto ready = std::make_unique<MpiRequest>(wire_, begins_.size());
        begin_head(*ready, HeadWord::ready, number);
        auto body = std::make_unique<MpiRequest>(wire_);
        const bool expected = body->expect_body(message.array.data, message.array.bytes, rank, number);
        if (!expected || !say(std::move(ready), rank)) return failed("receiving a message");
        for (;;) {
            const int next = await_body(*body, message, rank);
            if (next == nothing) break;
            if (next == came) {
                note("recv", message);
                return nb::bool_(true);
            }
            if (!hear_more(rank, peer, number)) continue;
            // The sender had taken the offer back before it heard that it is wanted. The next message may be the one.
            body->cancel();
            for (int i = 0; i < held_looks && !body->test();) ++i;
            if (body->test()) return waited(nb::none(), message);
            break;
        }
        const ArrayHead& head = message.head;
        const nb::bytes description(head.data() + sizeof(FrameHeader), head.size() - sizeof(FrameHeader));
        const nb::object request = given(std::move(body)), memory = memory_of(out, message);
        return waited(in_any_case([&] {
                          return general_.attr("go_on_receiving")(peer, number, memory, message.tag, description, request);
                      }),
                      message);
    }

    // Takes the next head, which came before the body. True if it takes back the offer; any other is for the general way.
    bool hear_more(int rank, const nb::object& peer, std::uint64_t number) {
        std::vector<std::byte> read(static_cast<std::size_t>(std::max(wire_.waiting(rank), 0)));
        if (read.empty() || !wire_.receive_head(read.data(), static_cast<int>(read.size()), rank)) return false;
        if (answers(read, HeadWord::cut, number)) return true;
        const nb::bytes other(read.data(), read.size());
        in_any_case([&] { return general_.attr("give_back")(peer, other); });
        return false;
    }

    // -- both ----------------------------------------------------------------------------------------------------------

    static std::byte* put(std::byte* to, const void* from, std::size_t bytes) {
        std::memcpy(to, from, bytes);
        return to + bytes;
    }

    // Writes what every head of this lane begins with; returns where it goes on.
    std::byte* begin_head(MpiRequest& head, HeadWord word, std::uint64_t number) const {
        std::byte* const data = head.data.get();
        std::memcpy(data, begins_.data(), begins_.size());
        data[0] = static_cast<std::byte>(word);
        std::memcpy(data + number_at, &number, sizeof number);
        return data + begins_.size();
    }

    // Whether a head of at least that length is of this lane, and says this word.
    bool is_ours(Head head, HeadWord word) const {
        return head[0] == static_cast<std::byte>(word) && std::memcmp(head.data() + 1, begins_.data() + 1, number_at - 1) == 0;
    }

    static nb::object given(std::unique_ptr<MpiRequest> request) {
        return nb::cast(request.release(), nb::rv_policy::take_ownership);
    }

    // Sends a head. Nobody waits until MPI has sent it.
    bool say(std::unique_ptr<MpiRequest> head, int rank) {
        if (!head->begin_head(rank)) return false;
        if (head->test()) return true;
        const nb::object request = given(std::move(head));
        in_any_case([&] { return general_.attr("keep")(request); });
        return true;
    }

    nb::object failed(const char* what) {
        in_interpreter([&] { return general_.attr("fail")(what); });
        throw std::logic_error("MPI failed, and nobody said so");
    }

    // Both sides have agreed on it, so that it does not take longer than its bytes do. Returns `came`, `nothing` if it is time
    // for the general way, or the bytes of a head that has come from `rank` before it.
    int await_body(MpiRequest& body, const Message& message, int rank = -1) {
        const std::size_t bytes = message.array.bytes;
        Bound bound = bound_of(message, lock_);
        bound.deadline_ns = std::min(monotonic_ns() + handover_ns + static_cast<std::int64_t>(bytes), // at 1 GB/s
                                     message.began + message.timeout_ns);
        const int looks = bytes <= worth_holding ? held_looks : 0;
        return await(looks, bound, false, [&] {
            if (body.test()) return came;
            return rank < 0 ? nothing : wire_.waiting(rank);
        });
    }

    // Looks until there is something, first so many times with the GIL. `naps`: after a while, sleeps between looks. Returns
    // `nothing` if it is time for the general way.
    template <class Look>
    int await(int held, const Bound& bound, bool naps, Look look) {
        for (int i = 0; i < held; ++i)
            if (const int found = look(); found != nothing) return found;
        lock_.forget_asking();
        Wait wait(policy_);
        const WithoutGil released;
        for (;;) {
            if (const int found = look(); found != nothing) {
                if (wait.waits()) wait.end(monotonic_ns());
                return found;
            }
            if (bound.aborted->load(std::memory_order_relaxed) != 0 || lock_.asked()) return nothing;
            if (look_again(wait)) continue;
            if (monotonic_ns() >= bound.deadline_ns) return nothing;
            pause(naps);
        }
    }

    static void pause(bool naps) {
        const timespec nap{0, nap_ns};
        if (naps)
            nanosleep(&nap, nullptr);
        else
            sched_yield();
    }

    const MpiWire wire_;
    const std::string begins_;
    nb::dict gone_;
    nb::object talked_;
    nb::dict behind_;
    nb::object unread_;
    nb::object lock_object_;
    ChannelLock& lock_;
    const std::size_t whole_;
    WaitPolicy policy_;
    nb::object general_, numbers_;
    nb::object unattended_object_;
    UnattendedReceives& unattended_;
    std::vector<Route> routes_;
};

// At most one thread at a time is at it, with the lock of all messages held. With the GIL held only.
class MpiMessages::Prepared {
public:
    Prepared(MpiMessages& path, const Message& message, nb::handle out)
        : path_(path),
          owner_(nb::find(path)),
          out_(nb::borrow(out)),
          message_(message),
          called_(message.began),
          site_(CallSite::current()) {}
    ~Prepared() { leave(); }
    Prepared(const Prepared&) = delete;
    Prepared& operator=(const Prepared&) = delete;

    // Takes its message. False if that is left to the general way. No signal is looked at between its end and the note of it.
    bool run() {
        Route* const route = waits_ ? route_of() : nullptr;
        if (route == nullptr || route->prepared.front() != this || path_.is_gone(*route)) return ended_;
        const Turn turn(path_.lock_);
        if (!turn.taken || path_.is_behind(*route)) return false;
        const Attending attending(path_.unattended_, attended_);
        path_.look_at(*route);
        message_.began = monotonic_ns();  // it counts as waiting from now on
        message_.longest_ns = std::min(handover_ns, called_ + message_.timeout_ns - message_.began);
        const CallSite::Lent lent(site_);
        ended_ = path_.receive(route->rank, route->number, message_, out_).ptr() == Py_True;
        if (ended_) leave();
        return ended_;
    }

    // It is posted, or has ended.
    void leave() noexcept {
        if (!waits_) return;
        waits_ = false;
        if (Route* const route = route_of(); route != nullptr) std::erase(route->prepared, this);
        if (!std::exchange(attended_, true)) path_.unattended_.remove();
    }

    bool ended() const noexcept { return ended_; }
    int src() const noexcept { return message_.peer; }
    std::int64_t tag() const noexcept { return message_.tag; }
    double began() const noexcept { return static_cast<double>(called_) * 1e-9; }
    double seconds() const noexcept { return static_cast<double>(message_.timeout_ns) * 1e-9; }
    const CallSite& site() const noexcept { return site_; }

private:
    // Null once the group is closed.
    Route* route_of() const noexcept {
        const auto peer = static_cast<std::size_t>(message_.peer);
        return peer < path_.routes_.size() ? &path_.routes_[peer] : nullptr;
    }

    class Attending {
    public:
        Attending(UnattendedReceives& all, bool& attended) : all_(all) {
            if (!std::exchange(attended, true)) all_.attend();
        }
        ~Attending() { all_.attended(); }
        Attending(const Attending&) = delete;
        Attending& operator=(const Attending&) = delete;

    private:
        UnattendedReceives& all_;
    };

    MpiMessages& path_;
    nb::object owner_;  // of the path
    nb::object out_;
    Message message_;
    std::int64_t called_;
    CallSite site_;
    bool waits_ = true, attended_ = false, ended_ = false;
};

nb::object MpiMessages::prepare(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout) {
    Message message;
    Route* const found = usable(src, message);
    if (found == nullptr || !describe(message, out, tag, timeout, true, "numpy") || message.array.bytes > whole_) return nb::none();
    if (comes_later(found->number) || !unattended_.add()) return nb::none();
    // The thread that this has started may have run, and the group may be closed.
    if (usable(src, message) != found) return unattended_.remove(), nb::none();
    auto made = std::make_unique<Prepared>(*this, message, out);
    found->prepared.push_back(made.get());
    return nb::cast(made.release(), nb::rv_policy::take_ownership);
}

}  // namespace

void phalanx::bind_mpi_messages(nb::module_& m) {
    nb::class_<MpiWire>(m, "MpiWire", "MPI's functions for messages, by their addresses.")
        .def(nb::init<const std::vector<MpiWire::Word>&, MpiWire::Word, MpiWire::Word, MpiWire::Word, int, int>(),
             nb::arg("functions"), nb::arg("heads"), nb::arg("bodies"), nb::arg("byte"), nb::arg("anyone"), nb::arg("highest_tag"));
    nb::class_<MpiRequest>(m, "MpiRequest", "What MPI has not finished yet.")
        .def("Test", &MpiRequest::test)
        .def("Cancel", &MpiRequest::cancel);
    nb::class_<UnattendedReceives>(m, "UnattendedReceives", "The prepared receives of a world that no thread waits for.")
        .def(nb::init<nb::object, nb::list, nb::object>(), nb::arg("alarm"), nb::arg("jobs"), nb::arg("start"))
        .def_prop_ro("count", &UnattendedReceives::count);
    nb::class_<MpiMessages>(m, "MpiMessages", "Sends and receives arrays through MPI, in one call each.")
        .def(nb::init<const MpiWire&, const nb::bytes&, int, const std::vector<int>&, nb::object, nb::object, nb::object, nb::object,
                      nb::object, double, std::size_t, std::size_t, bool, nb::object, nb::object, nb::object>(),
             nb::arg("wire"), nb::arg("begins"), nb::arg("rank"), nb::arg("members"), nb::arg("inbox"), nb::arg("reader"),
             nb::arg("lock"), nb::arg("arrays"), nb::arg("recorder"), nb::arg("timeout"), nb::arg("whole"), nb::arg("most"),
             nb::arg("oversubscribed"), nb::arg("general"), nb::arg("numbers"), nb::arg("unattended"))
        .def("close", &MpiMessages::close)
        .def("send", &MpiMessages::send, nb::arg("x").none(), nb::arg("dst").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none(), nb::arg("library") = "numpy")
        .def("send_at_once", &MpiMessages::send_at_once, nb::arg("x").none(), nb::arg("dst").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none())
        .def("recv", &MpiMessages::recv, nb::arg("out").none(), nb::arg("src").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none(), nb::arg("library") = "numpy")
        .def("prepare", &MpiMessages::prepare, nb::arg("out").none(), nb::arg("src").none(), nb::arg("tag").none(),
             nb::arg("timeout").none());
    nb::class_<MpiMessages::Prepared>(m, "PreparedReceive", "A receive that is not posted yet; see phalanx.group.verbs.prepared.")
        .def("run", &MpiMessages::Prepared::run)
        .def("leave", &MpiMessages::Prepared::leave)
        .def_prop_ro("ended", &MpiMessages::Prepared::ended)
        .def_prop_ro("src", &MpiMessages::Prepared::src)
        .def_prop_ro("tag", &MpiMessages::Prepared::tag)
        .def_prop_ro("began", &MpiMessages::Prepared::began)
        .def_prop_ro("seconds", &MpiMessages::Prepared::seconds)
        .def_prop_ro("site", &MpiMessages::Prepared::site, nb::rv_policy::copy);
}
