// The fast path of a synchronous send or receive of a short NumPy array through MPI: as FastMessages does it over rings. MPI's
// functions are called by their addresses, as in mpi_calls.hpp; src/phalanx/backends/mpi/protocol.py says what is sent.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "gil.hpp"
#include "message_calls.hpp"
#include "module.hpp"
#include "phalanx/wait_policy.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

// The functions that messages need, and the handles that they need. MPI_Request is a pointer or an int: a word holds either.
class MpiHeads {
public:
    using Word = std::uintptr_t;

    // `functions`: MPI_Isend, MPI_Test, MPI_Iprobe, MPI_Get_count, MPI_Recv. `comm` carries the heads, with the tag 0.
    MpiHeads(const std::vector<Word>& functions, Word comm, Word byte, int anyone)
        : functions_(functions), comm_(comm), byte_(byte), anyone_(anyone) {
        if (functions.size() != 5) throw std::invalid_argument("not all of MPI's functions");
    }

    bool begin_send(const void* data, std::size_t bytes, int dst, Word& request) const {
        return call<int(const void*, int, Word, int, int, Word, Word*)>(0)(data, static_cast<int>(bytes), byte_, dst, 0, comm_,
                                                                          &request) == 0;
    }

    bool test(Word& request) const {
        int done = 0;
        Status status;
        return call<int(Word*, int*, Status*)>(1)(&request, &done, &status) == 0 && done != 0;
    }

    // The bytes of the next head of a rank; -1 if there is none.
    int waiting(int src) const {
        int found = 0, bytes = 0;
        Status status;
        if (call<int(int, int, Word, int*, Status*)>(2)(src, 0, comm_, &found, &status) != 0 || found == 0) return -1;
        return call<int(const Status*, Word, int*)>(3)(&status, byte_, &bytes) == 0 ? bytes : -1;
    }
    bool anything_waits() const { return waiting(anyone_) >= 0; }

    bool receive(void* data, int bytes, int src) const {
        Status status;
        return call<int(void*, int, Word, int, int, Word, Status*)>(4)(data, bytes, byte_, src, 0, comm_, &status) == 0;
    }

private:
    struct alignas(16) Status {
        std::byte bytes[64];  // more than any MPI's
    };

    template <class Signature>
    Signature* call(std::size_t number) const noexcept {
        return reinterpret_cast<Signature*>(functions_[number]);
    }

    std::vector<Word> functions_;
    Word comm_, byte_;
    int anyone_;
};

// A head that MPI has not sent yet, with its memory. Python tests it as it tests mpi4py's requests.
class MpiHeadUnderWay {
public:
    MpiHeadUnderWay(const MpiHeads& mpi, std::size_t bytes)
        : mpi_(mpi), data(std::make_unique_for_overwrite<std::byte[]>(bytes)), bytes(bytes) {}

    bool begin(int dst) { return mpi_.begin_send(data.get(), bytes, dst, request_); }
    bool test() { return done_ || (done_ = mpi_.test(request_)); }

private:
    const MpiHeads mpi_;  // a copy: this may outlast the group
    MpiHeads::Word request_ = 0;
    bool done_ = false;

public:
    const std::unique_ptr<std::byte[]> data;
    const std::size_t bytes;
};

class MpiMessages : MessageCalls {
public:
    // `begins`: what the head of every message of this lane begins with. `inbox`, `reader` and `lock` are as in
    // src/phalanx/backends/mpi. `hand_over(request, rank)` makes an operation of a head that is under way, `give_back(rank,
    // head)` puts a head that was taken in line for the general way. `members` are world ranks, by which MPI and the inbox know
    // them.
    MpiMessages(const MpiHeads& mpi, const nb::bytes& begins, int rank, const std::vector<int>& members, nb::object inbox,
                nb::object reader, nb::object lock, nb::object arrays, nb::object recorder, double timeout, std::size_t most,
                bool oversubscribed, nb::object hand_over, nb::object give_back)
        : MessageCalls(inbox.attr("mailbox"), std::move(arrays), std::move(recorder), timeout, most),
          mpi_(mpi),
          begins_(begins.c_str(), begins.size()),
          gone_(inbox.attr("gone")),
          talked_(inbox.attr("talked")),
          behind_(reader.attr("behind")),
          unread_(reader.attr("unread")),
          lock_object_(std::move(lock)),
          lock_(*nb::cast<ChannelLock*>(lock_object_)),
          policy_(oversubscribed),
          hand_over_(std::move(hand_over)),
          give_back_(std::move(give_back)) {
        for (int i = 0; i < static_cast<int>(members.size()); ++i) {
            const int number = members[static_cast<std::size_t>(i)];
            routes_.push_back(i == rank ? Route{} : Route{number, nb::int_(number), false});
        }
    }

    // Declines everything from now on.
    void close() { routes_.clear(); }

    // True: done. False: declined, nothing has happened. Otherwise (operation or None, seconds waited).
    nb::object send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout, const char* library) {
        Message message;
        Route* const found = usable(dst, message);
        if (found == nullptr || !describe(message, x, tag, timeout, false, library)) return nb::bool_(false);
        // Now and then: that the other rank has closed the group is heard by the general way only.
        if (++sends_ % sends_between_looks == 0 && mpi_.anything_waits()) return nb::bool_(false);
        meet(*found);
        const int rank = found->rank;
        const ArrayHead& head = message.head;
        auto sending = std::make_unique<MpiHeadUnderWay>(mpi_, begins_.size() + head.size() + message.array.bytes);
        std::byte* const to = sending->data.get();
        std::memcpy(to, begins_.data(), begins_.size());
        std::memcpy(to + begins_.size(), head.data(), head.size());
        std::memcpy(to + begins_.size() + head.size(), message.array.data, message.array.bytes);
        if (!sending->begin(rank)) return waited(nb::none(), message);
        if (!sending->test()) {
            const nb::object number = found->number;
            const nb::object request = nb::cast(sending.release(), nb::rv_policy::take_ownership);
            return waited(in_any_case([&] { return hand_over_(request, number); }), message);
        }
        note("send", message);
        return nb::bool_(true);
    }

    nb::object recv(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout, const char* library) {
        Message message;
        Route* const found = usable(src, message);
        if (found == nullptr || !describe(message, out, tag, timeout, true, library)) return nb::bool_(false);
        const Turn turn(lock_);
        if (!turn.taken || behind_.size() != 0 || PyObject_Size(unread_.ptr()) != 0 || comes_later(found->number))
            return nb::bool_(false);
        meet(*found);
        return receive_head(found->rank, found->number, message);
    }

private:
    static constexpr unsigned sends_between_looks = 32;
    static constexpr int held_looks = 20;
    static constexpr long nap_ns = 20'000;
    static constexpr std::size_t longest_head = 4096;  // what is longer goes the general way, which need not wait for it

    struct Route {
        int rank = -1;  // in the world
        nb::object number{};
        bool met = false;
    };

    Route* usable(nb::handle rank, Message& message) {
        Route* const found = lookup(routes_, rank, message);
        if (found == nullptr || found->rank < 0) return nullptr;
        return gone_.size() != 0 && gone_.contains(found->number) ? nullptr : found;
    }

    // The other rank must hear when this one closes the group.
    void meet(Route& route) {
        if (!route.met && PySet_Add(talked_.ptr(), route.number.ptr()) != 0) throw nb::python_error();
        route.met = true;
    }

    nb::object receive_head(int rank, const nb::object number, const Message& message) {
        int bytes = -1;
        for (int i = 0; i < held_looks && bytes < 0; ++i) bytes = mpi_.waiting(rank);
        if (bytes < 0) {
            lock_.forget_asking();
            const Bound bound = bound_of(message, lock_);
            Wait wait(policy_);
            const WithoutGil released;
            bytes = await(rank, wait, bound);
        }
        const ArrayHead& head = message.head;
        const auto [data, size] = std::pair(message.array.data, message.array.bytes);
        std::array<std::byte, longest_head> read;
        if (bytes < 0 || static_cast<std::size_t>(bytes) > read.size() || !mpi_.receive(read.data(), bytes, rank))
            return waited(nb::none(), message);
        const std::size_t start = begins_.size() + head.size();
        if (static_cast<std::size_t>(bytes) == start + size && std::memcmp(read.data(), begins_.data(), begins_.size()) == 0 &&
            std::memcmp(read.data() + begins_.size(), head.data(), head.size()) == 0) {
            std::memcpy(data, read.data() + start, size);
            note("recv", message);
            return nb::bool_(true);
        }
        const nb::bytes other(read.data(), static_cast<std::size_t>(bytes));
        in_any_case([&] { return give_back_(number, other); });
        return waited(nb::none(), message);
    }

    // The bytes of the next head of a rank; -1 if it is time for the general way.
    int await(int rank, Wait& wait, const Bound& bound) const {
        for (;;) {
            const int bytes = mpi_.waiting(rank);
            if (bytes >= 0) {
                if (wait.waits()) wait.end(monotonic_ns());
                return bytes;
            }
            if (bound.aborted->load(std::memory_order_relaxed) != 0 || lock_.asked()) return -1;
            if (look_again(wait)) continue;
            if (monotonic_ns() >= bound.deadline_ns) return -1;
            const timespec nap{0, nap_ns};
            nanosleep(&nap, nullptr);
        }
    }

    const MpiHeads mpi_;
    const std::string begins_;
    nb::dict gone_;
    nb::object talked_;
    nb::dict behind_;
    nb::object unread_;
    nb::object lock_object_;
    ChannelLock& lock_;
    WaitPolicy policy_;
    nb::object hand_over_, give_back_;
    std::vector<Route> routes_;
    unsigned sends_ = 0;
};

}  // namespace

void phalanx::bind_mpi_messages(nb::module_& m) {
    nb::class_<MpiHeads>(m, "MpiHeads", "MPI's functions for messages, by their addresses.")
        .def(nb::init<const std::vector<MpiHeads::Word>&, MpiHeads::Word, MpiHeads::Word, int>(), nb::arg("functions"),
             nb::arg("comm"), nb::arg("byte"), nb::arg("anyone"));
    nb::class_<MpiHeadUnderWay>(m, "MpiHeadUnderWay", "A head that MPI has not sent yet.")
        .def("Test", &MpiHeadUnderWay::test);
    nb::class_<MpiMessages>(m, "MpiMessages", "Sends and receives short arrays through MPI, in one call each.")
        .def(nb::init<const MpiHeads&, const nb::bytes&, int, const std::vector<int>&, nb::object, nb::object, nb::object, nb::object,
                      nb::object, double, std::size_t, bool, nb::object, nb::object>(),
             nb::arg("mpi"), nb::arg("begins"), nb::arg("rank"), nb::arg("members"), nb::arg("inbox"), nb::arg("reader"),
             nb::arg("lock"), nb::arg("arrays"), nb::arg("recorder"), nb::arg("timeout"), nb::arg("most"),
             nb::arg("oversubscribed"), nb::arg("hand_over"), nb::arg("give_back"))
        .def("close", &MpiMessages::close)
        .def("send", &MpiMessages::send, nb::arg("x").none(), nb::arg("dst").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none(), nb::arg("library") = "numpy")
        .def("recv", &MpiMessages::recv, nb::arg("out").none(), nb::arg("src").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none(), nb::arg("library") = "numpy");
}
