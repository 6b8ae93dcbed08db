// The fast path of a send or receive of an array through MPI: as FastMessages does it over rings. An asynchronous receive is only
// prepared, and an asynchronous send of a long array only offered: the thread that waits for one of them moves it as it would a
// synchronous one, and with it all others of the group that are under way here. What no thread waits for, and what lasts, goes on
// the general way.
// src/phalanx/backends/mpi/protocol.py says what is sent.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <ctime>
#include <deque>
#include <memory>
#include <optional>
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

// The prepared messages of a world that no thread waits for. Its background thread, which has other `jobs`, too, goes on with them
// a moment later (src/phalanx/backends/mpi/progress_thread.py). With the GIL held only.
class UnattendedMessages {
public:
    // `start()` starts that thread.
    UnattendedMessages(nb::object alarm, nb::list jobs, nb::object start)
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
          unattended_(*nb::cast<UnattendedMessages*>(unattended_object_)) {
        for (int i = 0; i < static_cast<int>(members.size()); ++i) {
            const int number = members[static_cast<std::size_t>(i)];
            routes_.push_back(i == rank ? Route{} : Route{number, nb::int_(number)});
        }
    }

    // Declines everything from now on.
    void close() { closed_ = true; }

    // True: done. False: declined, nothing has happened. Otherwise (operation or None, seconds waited).
    nb::object send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout, const char* library) {
        Transfer sending;
        Route* const found = usable(dst, sending.message);
        if (found == nullptr || !describe(sending.message, x, tag, timeout, false, library)) return nb::bool_(false);
        return sending.message.array.bytes <= whole_ ? send_whole(*found, sending) : send_in_two(*found, sending, x);
    }

    // As `send`, but it never waits: a message that does not travel in its head is prepared.
    nb::object post_send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout) {
        Transfer sending;
        Route* const found = usable(dst, sending.message);
        if (found == nullptr || !describe(sending.message, x, tag, timeout, false, "numpy")) return nb::bool_(false);
        if (sending.message.array.bytes <= whole_) return send_whole(*found, sending);
        return prepare(sending.message, dst, x, true);
    }

    nb::object recv(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout, const char* library) {
        Transfer receiving;
        Message& message = receiving.message;
        Route* const found = usable(src, message);
        if (found == nullptr || !describe(message, out, tag, timeout, true, library)) return nb::bool_(false);
        const Turn turn(lock_);
        if (!turn.taken || is_behind(*found)) return nb::bool_(false);
        look_at(*found);
        receiving.set_time();
        const Listed listed(*this, found->incoming, receiving);
        return finish("recv", *found, receiving, false, [&] { return go_on_receiving(*found, receiving, out, nb::none()); });
    }

    // A message that the call does not wait for, and that is not begun; None: declined.
    nb::object prepare_receive(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout);
    nb::object prepare_send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout);

private:
    nb::object prepare(Message& message, nb::handle peer, nb::handle array, bool sends);

    static constexpr unsigned sends_between_looks = 32;
    static constexpr int held_looks = 20;
    static constexpr std::size_t worth_holding = 16 << 10;  // bytes: MPI may copy more than these while it is looked at
    static constexpr long nap_ns = 20'000;
    static constexpr int nothing = -1, give_up = -2, came = -3;  // what a look has found, if not the number of a route
    static constexpr int most_looks_for_cancelled = 1'000'000;

    // A message that this path has begun to move.
    struct Transfer {
        Message message;
        std::int64_t deadline_ns = 0;
        std::int64_t until_ns = 0;             // the general way goes on with it
        std::uint64_t number = 0;              // its sender's; 0 if it has no body
        std::unique_ptr<MpiRequest> moving{};  // what MPI has of it: its body, or the head that a short one travels in
        bool ended = false;

        void set_time() {
            deadline_ns = message.began + message.timeout_ns;
            until_ns = message.began + message.longest_ns;
        }
        bool look() { return ended = ended || (moving != nullptr && moving->test()); }
    };

    using Transfers = std::deque<Transfer*>;

    struct Route {
        int rank = -1;  // in the world
        nb::object number{};
        bool met = false;
        unsigned sends = 0;    // since this rank has last looked at what that one has sent
        Transfers incoming{};  // receives, in the order of the calls
        Transfers offered{};   // sends of messages with a body
    };

    // A transfer is among those of its route for as long as this lives.
    class Listed {
    public:
        Listed(MpiMessages& path, Transfers& line, Transfer& transfer) : path_(path), line_(line), transfer_(transfer) {
            line_.push_back(&transfer_);
            ++path_.under_way_;
        }
        ~Listed() {
            std::erase(line_, &transfer_);
            --path_.under_way_;
        }
        Listed(const Listed&) = delete;
        Listed& operator=(const Listed&) = delete;

    private:
        MpiMessages& path_;
        Transfers& line_;
        Transfer& transfer_;
    };

    Route* usable(nb::handle rank, Message& message) {
        Route* const found = closed_ ? nullptr : lookup(routes_, rank, message);
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

    // Now and then: that the other rank has closed the group is heard by the general way only.
    bool must_look(Route& route) const { return ++route.sends % sends_between_looks == 0 && wire_.anything_waits(); }

    nb::object send_whole(Route& route, Transfer& sending) {
        if (must_look(route)) return nb::bool_(false);
        if (!begin_whole(route, sending)) return waited(nb::none(), sending.message);
        if (!sending.ended) return waited(go_on_sending(route, sending, nb::none()), sending.message);
        note("send", sending.message);
        return nb::bool_(true);
    }

    // False if MPI has not taken it.
    bool begin_whole(Route& route, Transfer& sending) {
        meet(route);
        const Message& message = sending.message;
        const ArrayHead& head = message.head;
        sending.moving = std::make_unique<MpiRequest>(wire_, begins_.size() + head.size() + message.array.bytes);
        std::byte* const to = begin_head(*sending.moving, HeadWord::message, 0);
        std::memcpy(to, head.data(), head.size());
        std::memcpy(to + head.size(), message.array.data, message.array.bytes);
        if (!sending.moving->begin_head(route.rank)) return false;
        // Some MPIs send more than a few hundred bytes only when the receiver has looked, which it may be about to do.
        for (int i = 0; i < held_looks && !sending.look(); ++i) {}
        return true;
    }

    // Offers it, and sends its body when the receiver asks for it. Until then it can be taken back.
    nb::object send_in_two(Route& route, Transfer& sending, nb::handle x) {
        const Turn turn(lock_);
        // What has come for nothing that is under way here is for the general way, and the answer would be behind it.
        if (!turn.taken || has_line() || (under_way_ == 0 && wire_.anything_waits())) return nb::bool_(false);
        const Message& message = sending.message;
        sending.set_time();
        const Listed listed(*this, route.offered, sending);
        if (!offer(route, sending)) return waited(nb::none(), message);
        return finish("send", route, sending, true, [&] { return go_on_sending(route, sending, x); });
    }

    // False if MPI has not taken it.
    bool offer(Route& route, Transfer& sending) {
        meet(route);
        const nb::object number = nb::steal(PyIter_Next(numbers_.ptr()));
        if (!number.is_valid()) throw nb::python_error();
        sending.number = nb::cast<std::uint64_t>(number);
        return say(offer_of(sending), route.rank);
    }

    std::unique_ptr<MpiRequest> offer_of(const Transfer& sending) const {
        const ArrayHead& head = sending.message.head;
        auto offer = std::make_unique<MpiRequest>(wire_, begins_.size() + head.size() + sizes_bytes);
        const std::uint16_t parts = 1;
        const std::uint64_t size = sending.message.array.bytes;
        std::byte* to = begin_head(*offer, HeadWord::offer, sending.number);
        to = put(to, head.data(), sizeof(FrameHeader));
        to = put(to, &parts, sizeof parts);
        to = put(to, &size, sizeof size);
        put(to, head.data() + sizeof(FrameHeader), head.size() - sizeof(FrameHeader));
        return offer;
    }

    // The operation by which the general way goes on sending it.
    nb::object go_on_sending(const Route& route, Transfer& sending, nb::handle x) {
        const nb::object peer = route.number;
        if (sending.number == 0) {
            const nb::object request = given(std::move(sending.moving));
            return in_any_case([&] { return general_.attr("go_on_with_head")(peer, request); });
        }
        const nb::object memory = memory_of(x, sending.message);
        if (sending.moving == nullptr)
            return in_any_case([&] { return general_.attr("go_on_offering")(peer, sending.number, memory); });
        const nb::object request = given(std::move(sending.moving));
        return in_any_case([&] { return general_.attr("go_on_sending")(peer, memory, request); });
    }

    // -- receiving -----------------------------------------------------------------------------------------------------

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

    void accept(const Route& route, Transfer& receiving, std::uint64_t number) {
        auto ready = std::make_unique<MpiRequest>(wire_, begins_.size());
        begin_head(*ready, HeadWord::ready, number);
        auto body = std::make_unique<MpiRequest>(wire_);
        const PlainArray& array = receiving.message.array;
        if (!body->expect_body(array.data, array.bytes, route.rank, number)) failed("receiving a message");
        receiving.number = number;
        body_begins(receiving, std::move(body));
        if (!say(std::move(ready), route.rank)) failed("receiving a message");
    }

    // The sender had taken its offer back before it heard that it is wanted. The next message may be the one.
    void forget_body(Transfer& receiving) {
        receiving.moving->cancel();
        for (int i = 0; !receiving.moving->test(); ++i)
            if (i == most_looks_for_cancelled) failed("taking back a receive");
        receiving.moving.reset();
    }

    // The operation by which the general way goes on receiving it; None if it has only to be posted. `sink`: see handover.py.
    nb::object go_on_receiving(const Route& route, Transfer& receiving, nb::handle out, nb::handle sink) {
        if (receiving.moving == nullptr) return nb::none();
        const Message& message = receiving.message;
        const ArrayHead& head = message.head;
        const nb::bytes description(head.data() + sizeof(FrameHeader), head.size() - sizeof(FrameHeader));
        const nb::object peer = route.number, request = given(std::move(receiving.moving)), memory = memory_of(out, message);
        return in_any_case([&] {
            return general_.attr("go_on_receiving")(peer, receiving.number, memory, message.tag, description, request, sink);
        });
    }

    // -- both ----------------------------------------------------------------------------------------------------------

    // Moves a message of a call that waits for it.
    template <class GoOn>
    nb::object finish(const char* verb, Route& route, Transfer& transfer, bool sends, GoOn go_on) {
        try {
            move(route, transfer, sends);
        } catch (const nb::python_error&) {  // an interrupt: the caller takes back what the general way has
            if (!transfer.ended) go_on();
            throw;
        }
        if (!transfer.ended) return waited(go_on(), transfer.message);
        note(verb, transfer.message);
        return nb::bool_(true);
    }

    // Moves messages until this one has ended. False if it is time for the general way. With the lock held.
    bool move(const Route& route, Transfer& transfer, bool sends) {
        const int own = static_cast<int>(&route - routes_.data());
        const std::vector<int> others = other_routes(route);
        while (!transfer.look()) {
            const bool moving = transfer.moving != nullptr;
            int bytes = 0;  // of the head that was found
            const int found = await(transfer, [&] {
                if (transfer.look()) return came;
                // Who waits for an answer must hear everyone: another rank may wait for this one.
                if (sends && !moving && !wire_.anything_waits()) return nothing;
                if ((bytes = wire_.waiting(route.rank)) >= 0) return own;
                for (const int other : others)
                    if ((bytes = wire_.waiting(routes_[static_cast<std::size_t>(other)].rank)) >= 0) return other;
                return sends && !moving ? give_up : nothing;
            });
            if (found == nothing || found == give_up) return false;
            if (found != came && !take(routes_[static_cast<std::size_t>(found)], bytes, moving) && !moving) return false;
        }
        return true;
    }

    // Those on which other messages are under way.
    std::vector<int> other_routes(const Route& route) const {
        std::vector<int> found;
        if (under_way_ == static_cast<int>(route.incoming.size() + route.offered.size())) return found;
        for (std::size_t i = 0; i < routes_.size(); ++i)
            if (&routes_[i] != &route && !(routes_[i].incoming.empty() && routes_[i].offered.empty()))
                found.push_back(static_cast<int>(i));
        return found;
    }

    // Takes the next head of a rank. False if the general way has to look at it. `any`: takes it however long it is.
    bool take(Route& route, int bytes, bool any) {
        std::array<std::byte, longest_head> usual;
        std::vector<std::byte> longer;
        if (static_cast<std::size_t>(bytes) > usual.size()) {
            if (!any) return false;
            longer.resize(static_cast<std::size_t>(bytes));
        }
        std::byte* const read = longer.empty() ? usual.data() : longer.data();
        if (!wire_.receive_head(read, bytes, route.rank)) return false;
        const Head head(read, static_cast<std::size_t>(bytes));
        if (head.size() == begins_.size() ? hear(route, head) : match(route, head)) return true;
        const nb::object peer = route.number;
        const nb::bytes other(head.data(), head.size());
        in_any_case([&] { return general_.attr("give_back")(peer, other); });
        return false;
    }

    // Does what the word of the other rank says about a message with a body; false if that is none of these.
    bool hear(const Route& route, Head head) {
        const auto number = read_at<std::uint64_t>(head, number_at);
        const bool ready = is_ours(head, HeadWord::ready);
        if (ready || is_ours(head, HeadWord::drop)) {
            for (Transfer* const sending : route.offered) {
                if (sending->number != number || sending->moving != nullptr || sending->ended) continue;
                if (ready)
                    send_body(route, *sending);
                else
                    sending->ended = true;
                return true;
            }
        } else if (is_ours(head, HeadWord::cut)) {
            for (Transfer* const receiving : route.incoming) {
                if (receiving->moving == nullptr || receiving->number != number || receiving->ended) continue;
                forget_body(*receiving);
                return true;
            }
        }
        return false;
    }

    void send_body(const Route& route, Transfer& sending) {
        auto body = std::make_unique<MpiRequest>(wire_);
        const PlainArray& array = sending.message.array;
        if (!body->begin_body(array.data, array.bytes, route.rank, sending.number)) failed("sending a message");
        body_begins(sending, std::move(body));
    }

    // Gives a message, or the offer of one, to the first receive of its tag. False if that does not fit, or if there is none.
    bool match(const Route& route, Head head) {
        const std::size_t tag_at = begins_.size() + offsetof(FrameHeader, tag);
        if (is_behind(route) || head.size() < begins_.size() + sizeof(FrameHeader)) return false;
        const auto tag = static_cast<std::int64_t>(read_at<std::uint64_t>(head, tag_at));
        for (Transfer* const receiving : route.incoming) {
            const Message& message = receiving->message;
            if (receiving->ended || receiving->moving != nullptr || message.tag != tag) continue;
            if (is_whole(head, message)) {
                std::memcpy(message.array.data, head.data() + head.size() - message.array.bytes, message.array.bytes);
                return receiving->ended = true;
            }
            if (!is_offer(head, message)) return false;
            accept(route, *receiving, read_at<std::uint64_t>(head, number_at));
            return true;
        }
        return false;
    }

    // Both sides have agreed on it, so that it does not take longer than its bytes do.
    static void body_begins(Transfer& transfer, std::unique_ptr<MpiRequest> body) {
        const auto bytes = static_cast<std::int64_t>(transfer.message.array.bytes);
        transfer.moving = std::move(body);
        transfer.until_ns = std::min(monotonic_ns() + handover_ns + bytes, transfer.deadline_ns);  // at 1 GB/s
    }

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

    [[noreturn]] void failed(const char* what) {
        in_interpreter([&] { return general_.attr("fail")(what); });
        throw std::logic_error("MPI failed, and nobody said so");
    }

    // Looks until there is something, first a few times with the GIL. Returns `nothing` if it is time for the general way.
    template <class Look>
    int await(const Transfer& transfer, Look look) {
        const bool moving = transfer.moving != nullptr;
        if (!moving || transfer.message.array.bytes <= worth_holding)
            for (int i = 0; i < held_looks; ++i)
                if (const int found = look(); found != nothing) return found;
        lock_.forget_asking();
        Wait wait(policy_);
        const WithoutGil released;
        for (;;) {
            if (const int found = look(); found != nothing) {
                if (wait.waits()) wait.end(monotonic_ns());
                return found;
            }
            if (lock_.wanted().load(std::memory_order_relaxed) != 0 || lock_.asked()) return nothing;
            if (look_again(wait)) continue;
            if (monotonic_ns() >= transfer.until_ns) return nothing;
            pause(!moving);  // what MPI is moving goes on with every look
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
    UnattendedMessages& unattended_;
    std::vector<Route> routes_;  // never changed, because threads without the GIL read it
    int under_way_ = 0;          // transfers on all routes
    bool closed_ = false;
};

// A message that the call does not wait for. At most one thread at a time is at it, with the lock of all messages held. With the
// GIL held only.
class MpiMessages::Prepared {
public:
    Prepared(MpiMessages& path, const Message& message, nb::handle array, bool sends)
        : path_(path),
          owner_(nb::find(path)),
          array_(nb::borrow(array)),
          called_(message.began),
          site_(CallSite::current()),
          sends_(sends) {
        transfer_.message = message;
        transfer_.set_time();
    }
    ~Prepared() {
        leave();
        if (transfer_.ended || transfer_.moving == nullptr) return;
        transfer_.moving.release();  // MPI still has the memory, and no caller ever got this object
        array_.release();
    }
    Prepared(const Prepared&) = delete;
    Prepared& operator=(const Prepared&) = delete;

    // Sends or offers it, or has it take its message from now on, unless that was done before, or the general way
    // has it. Raises if MPI refuses it.
    void begin() {
        if (!waits_ || std::exchange(begun_, true)) return;
        Route& route = this->route();
        const bool has_body = transfer_.message.array.bytes > path_.whole_;
        if (!sends_ || has_body) listed_.emplace(path_, sends_ ? route.offered : route.incoming, transfer_);
        if (!sends_ || (has_body ? path_.offer(route, transfer_) : path_.begin_whole(route, transfer_))) return;
        begun_ = false;
        path_.failed("sending a message");
    }

    // Moves it. False if that is left to the general way. No signal is looked at between its end and the note of it.
    bool run() {
        if (!waits_) return transfer_.ended;
        const Turn turn(path_.lock_);
        if (!turn.taken) return false;
        if (transfer_.look()) return end();
        Route& route = this->route();
        if (path_.closed_ || path_.is_gone(route)) return false;
        if (transfer_.moving == nullptr && (sends_ ? path_.has_line() : path_.is_behind(route))) return false;
        const Attending attending(path_.unattended_, attended_);
        path_.look_at(route);
        Message& message = transfer_.message;
        message.began = monotonic_ns();  // it counts as waiting from now on
        const auto bytes = transfer_.moving != nullptr ? static_cast<std::int64_t>(message.array.bytes) : 0;
        transfer_.until_ns = std::min(message.began + handover_ns + bytes, transfer_.deadline_ns);
        return path_.move(route, transfer_, sends_) && end();
    }

    // Sends this one, and receives the other. False if that is left to the general way, which goes on with the `operation` of each.
    bool exchange(Prepared& receiving) {
        const Turn turn(path_.lock_);
        if (!turn.taken || path_.is_behind(receiving.route())) return false;
        try {
            receiving.begin();
            begin();
            if (run() && receiving.run()) return true;
        } catch (const nb::python_error&) {  // an interrupt: the caller takes back what the general way has
            hand_over(nb::none());
            receiving.hand_over(nb::none());
            throw;
        }
        hand_over(nb::none());
        receiving.hand_over(nb::none());
        return false;
    }

    // Leaves it to the general way. Returns the operation that goes on with it; None if it has ended, or has not begun. With the
    // lock held. `sink`: see handover.py.
    nb::object hand_over(nb::handle sink) {
        if (sends_ && begun_ && !transfer_.ended)
            operation_ = path_.go_on_sending(route(), transfer_, array_);
        else if (!sends_ && !transfer_.ended)
            operation_ = path_.go_on_receiving(route(), transfer_, array_, sink);
        leave();
        return operation_;
    }

    // The general way has it, or it has ended.
    void leave() noexcept {
        if (!std::exchange(waits_, false)) return;
        listed_.reset();
        if (!std::exchange(attended_, true)) path_.unattended_.remove();
    }

    bool overlaps(const Prepared& other) const noexcept {
        const PlainArray &mine = transfer_.message.array, &theirs = other.transfer_.message.array;
        const auto* const begin = static_cast<const std::byte*>(mine.data);
        const auto* const other_begin = static_cast<const std::byte*>(theirs.data);
        return begin < other_begin + theirs.bytes && other_begin < begin + mine.bytes;
    }

    bool ended() const noexcept { return transfer_.ended; }
    nb::object operation() const { return operation_; }
    int peer() const noexcept { return transfer_.message.peer; }
    std::int64_t tag() const noexcept { return transfer_.message.tag; }
    std::size_t bytes() const noexcept { return transfer_.message.array.bytes; }
    double began() const noexcept { return static_cast<double>(called_) * 1e-9; }
    double seconds() const noexcept { return static_cast<double>(transfer_.message.timeout_ns) * 1e-9; }
    const CallSite& site() const noexcept { return site_; }

private:
    Route& route() const noexcept { return path_.routes_[static_cast<std::size_t>(transfer_.message.peer)]; }

    bool end() {
        const CallSite::Lent lent(site_);
        path_.note(sends_ ? "send" : "recv", transfer_.message);
        leave();
        return true;
    }

    class Attending {
    public:
        Attending(UnattendedMessages& all, bool& attended) : all_(all) {
            if (!std::exchange(attended, true)) all_.attend();
        }
        ~Attending() { all_.attended(); }
        Attending(const Attending&) = delete;
        Attending& operator=(const Attending&) = delete;

    private:
        UnattendedMessages& all_;
    };

    MpiMessages& path_;
    nb::object owner_;  // of the path
    nb::object array_;
    nb::object operation_ = nb::none();
    Transfer transfer_;
    std::int64_t called_;
    CallSite site_;
    std::optional<Listed> listed_;
    const bool sends_;
    bool begun_ = false, waits_ = true, attended_ = false;
};

nb::object MpiMessages::prepare_receive(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout) {
    Message message;
    Route* const found = usable(src, message);
    if (found == nullptr || !describe(message, out, tag, timeout, true, "numpy") || comes_later(found->number)) return nb::none();
    return prepare(message, src, out, false);
}

nb::object MpiMessages::prepare_send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout) {
    Message message;
    Route* const found = usable(dst, message);
    if (found == nullptr || !describe(message, x, tag, timeout, false, "numpy")) return nb::none();
    if (message.array.bytes <= whole_ && must_look(*found)) return nb::none();
    return prepare(message, dst, x, true);
}

nb::object MpiMessages::prepare(Message& message, nb::handle peer, nb::handle array, bool sends) {
    if (!unattended_.add()) return nb::none();
    // The thread that this has started may have run, and the group may be closed.
    if (usable(peer, message) == nullptr) return unattended_.remove(), nb::none();
    return nb::cast(new Prepared(*this, message, array, sends), nb::rv_policy::take_ownership);
}

}  // namespace

void phalanx::bind_mpi_messages(nb::module_& m) {
    nb::class_<MpiWire>(m, "MpiWire", "MPI's functions for messages, by their addresses.")
        .def(nb::init<const std::vector<MpiWire::Word>&, MpiWire::Word, MpiWire::Word, MpiWire::Word, int, int>(),
             nb::arg("functions"), nb::arg("heads"), nb::arg("bodies"), nb::arg("byte"), nb::arg("anyone"), nb::arg("highest_tag"));
    nb::class_<MpiRequest>(m, "MpiRequest", "What MPI has not finished yet.")
        .def("Test", &MpiRequest::test)
        .def("Cancel", &MpiRequest::cancel);
    nb::class_<UnattendedMessages>(m, "UnattendedMessages", "The prepared messages of a world that no thread waits for.")
        .def(nb::init<nb::object, nb::list, nb::object>(), nb::arg("alarm"), nb::arg("jobs"), nb::arg("start"))
        .def_prop_ro("count", &UnattendedMessages::count);
    nb::class_<MpiMessages>(m, "MpiMessages", "Sends and receives arrays through MPI, in one call each.")
        .def(nb::init<const MpiWire&, const nb::bytes&, int, const std::vector<int>&, nb::object, nb::object, nb::object, nb::object,
                      nb::object, double, std::size_t, std::size_t, bool, nb::object, nb::object, nb::object>(),
             nb::arg("wire"), nb::arg("begins"), nb::arg("rank"), nb::arg("members"), nb::arg("inbox"), nb::arg("reader"),
             nb::arg("lock"), nb::arg("arrays"), nb::arg("recorder"), nb::arg("timeout"), nb::arg("whole"), nb::arg("most"),
             nb::arg("oversubscribed"), nb::arg("general"), nb::arg("numbers"), nb::arg("unattended"))
        .def("close", &MpiMessages::close)
        .def("send", &MpiMessages::send, nb::arg("x").none(), nb::arg("dst").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none(), nb::arg("library") = "numpy")
        .def("post_send", &MpiMessages::post_send, nb::arg("x").none(), nb::arg("dst").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none())
        .def("recv", &MpiMessages::recv, nb::arg("out").none(), nb::arg("src").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none(), nb::arg("library") = "numpy")
        .def("prepare_receive", &MpiMessages::prepare_receive, nb::arg("out").none(), nb::arg("src").none(), nb::arg("tag").none(),
             nb::arg("timeout").none())
        .def("prepare_send", &MpiMessages::prepare_send, nb::arg("x").none(), nb::arg("dst").none(), nb::arg("tag").none(),
             nb::arg("timeout").none());
    nb::class_<MpiMessages::Prepared>(m, "PreparedMpiMessage", "A message that its call does not wait for; see phalanx.group.verbs.prepared.")
        .def("begin", &MpiMessages::Prepared::begin)
        .def("run", &MpiMessages::Prepared::run)
        .def("exchange", &MpiMessages::Prepared::exchange, nb::arg("receiving"))
        .def("hand_over", &MpiMessages::Prepared::hand_over, nb::arg("sink") = nb::none())
        .def("leave", &MpiMessages::Prepared::leave)
        .def("overlaps", &MpiMessages::Prepared::overlaps, nb::arg("other"))
        .def_prop_ro("ended", &MpiMessages::Prepared::ended)
        .def_prop_ro("operation", &MpiMessages::Prepared::operation)
        .def_prop_ro("peer", &MpiMessages::Prepared::peer)
        .def_prop_ro("tag", &MpiMessages::Prepared::tag)
        .def_prop_ro("bytes", &MpiMessages::Prepared::bytes)
        .def_prop_ro("began", &MpiMessages::Prepared::began)
        .def_prop_ro("seconds", &MpiMessages::Prepared::seconds)
        .def_prop_ro("site", &MpiMessages::Prepared::site, nb::rv_policy::copy);
}
