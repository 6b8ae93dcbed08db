// The fast path of a group's collectives over TCP: a synchronous call on plain contiguous NumPy arrays, with the default
// timeout, from the Group's method to the sockets without any Python in between. What is not as simple is declined with
// None, before anything has happened. What lasts, or goes wrong, is handed over where it stands: the general way
// (phalanx/group/engines/steps/run.py) knows about deadlines, lost ranks and interrupts.

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "channel_lock.hpp"
#include "collective_calls.hpp"
#include "module.hpp"
#include "steps_run.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

// The memory that a chunk lies in: the caller's two arrays, or memory of the call.
enum class Place : int { none = -1, x, out, scratch };

struct Area {
    Place place;
    std::size_t offset;
};

// A collective on arrays of one size: its steps, its channels, and where in the arrays its chunks lie. Made once by
// phalanx.group.engines.steps.layout.
class StepsLayout {
public:
    using Numbers = std::array<std::int64_t, 5>;

    // Each of `chunks`: its size, its place and offset, and those of its first contents where they are elsewhere.
    // `copies`: size, from, to. `salt`: of the algorithm. `origin`: what the maker wants to have back.
    StepsLayout(const Plan& plan, nb::list outbound, nb::list inbound, const std::vector<Numbers>& chunks,
           const std::vector<Numbers>& copies, std::size_t scratch, std::uint64_t salt, nb::object origin)
        : origin(std::move(origin)), scratch(scratch), salt(salt), plan_(plan.steps) {
        for (const nb::handle channel : outbound) add(channel, out, out_fds_).queue = channel.attr("queue");
        for (const nb::handle channel : inbound) add(channel, in, in_fds_);
        // A rank that gives up closes the channel that it sends on first: looking at that one is enough.
        watched_ = in_fds_;
        for (std::size_t i = 0; i < out.size(); ++i) {
            const nb::object peer = out[i].channel.attr("dst");
            const auto sends = [&](const Channel& other) { return other.channel.attr("src").equal(peer); };
            if (std::none_of(in.begin(), in.end(), sends)) watched_.push_back(out_fds_[i]);
        }
        for (const Numbers& c : chunks)
            chunks_.push_back({static_cast<std::size_t>(c[0]), area(c[1], c[2]), area(c[3], c[4])});
        for (const Numbers& c : copies)
            copies_.push_back({static_cast<std::size_t>(c[0]), area(c[1], c[2]), area(c[3], c[4])});
        // Whether a chunk can be reduced depends on the dtype, which the caller has looked at.
        Run::check(plan, chunks_.size(), out.size(), in.size(), static_cast<int>(Dtype::uint8), static_cast<int>(Op::sum));
    }

    struct Channel {
        nb::object channel;
        ChannelLock* lock = nullptr;
        nb::object queue{};
    };

    // The steps, ready to go. Those of short collectives are kept.
    std::unique_ptr<Steps> start(const std::array<std::byte*, 3>& memory, std::uint64_t fingerprint, const Combine& how) {
        std::unique_ptr<Steps> steps = std::move(kept_);
        std::vector<Chunk> fresh;
        std::vector<Chunk>& chunks = steps != nullptr ? steps->chunks() : fresh;
        if (steps == nullptr) fresh.resize(chunks_.size());
        for (std::size_t i = 0; i < chunks_.size(); ++i) {
            const Piece& piece = chunks_[i];
            chunks[i].memory = at(memory, piece.first);
            chunks[i].own = piece.second.place == Place::none ? nullptr : at(memory, piece.second);
            chunks[i].size = piece.size;
        }
        if (steps != nullptr)
            steps->restart(fingerprint, how.dtype, how.op);
        else
            steps = std::make_unique<Steps>(plan_, std::move(fresh), out_fds_, in_fds_, watched_, fingerprint, how.dtype, how.op);
        return steps;
    }

    void keep(std::unique_ptr<Steps> steps) noexcept { kept_ = std::move(steps); }

    void copy(const std::array<std::byte*, 3>& memory) const noexcept {
        for (const Piece& piece : copies_)
            if (at(memory, piece.first) != at(memory, piece.second))
                std::memcpy(at(memory, piece.second), at(memory, piece.first), piece.size);
    }

    nb::object origin;
    const std::size_t scratch;
    const std::uint64_t salt;
    std::vector<Channel> out, in;

private:
    struct Piece {
        std::size_t size;
        Area first, second;
    };

    static Area area(std::int64_t place, std::int64_t offset) {
        return {static_cast<Place>(place), static_cast<std::size_t>(offset)};
    }

    static std::byte* at(const std::array<std::byte*, 3>& memory, const Area& area) noexcept {
        return memory[static_cast<std::size_t>(area.place)] + area.offset;
    }

    static Channel& add(nb::handle channel, std::vector<Channel>& channels, std::vector<int>& fds) {
        fds.push_back(nb::cast<int>(channel.attr("stream").attr("fd")));
        channels.push_back({nb::borrow(channel), nb::cast<ChannelLock*>(channel.attr("lock"))});
        return channels.back();
    }

    std::shared_ptr<const std::vector<Step>> plan_;
    std::vector<int> out_fds_, in_fds_, watched_;
    std::vector<Piece> chunks_, copies_;
    std::unique_ptr<Steps> kept_;
};

// The channels of a collective, each at rest and held by this thread. With the GIL held only.
class Held {
public:
    Held(const StepsLayout& layout, const nb::object& ended, const nb::object& resting) : layout_(layout) {
        all = true;
        for (const auto* channels : {&layout.out, &layout.in})
            for (const StepsLayout::Channel& channel : *channels) {
                const bool sends = channels == &layout.out;
                all = all && channel.lock->try_enter();
                if (!all) return;
                ++count_;
                all = sends ? says(channel.channel, ended, Py_False) && PyObject_Size(channel.queue.ptr()) == 0
                            : says(channel.channel, resting, Py_True);
            }
    }
    ~Held() { release(); }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

    bool all = false;

    // By another thread.
    bool wanted() const noexcept {
        for (const auto* channels : {&layout_.out, &layout_.in})
            for (const StepsLayout::Channel& channel : *channels)
                if (channel.lock->wanted().load(std::memory_order_relaxed) != 0) return true;
        return false;
    }

    void release() noexcept {
        for (const auto* channels : {&layout_.out, &layout_.in})
            for (const StepsLayout::Channel& channel : *channels)
                if (count_ > 0) --count_, channel.lock->exit();
    }

private:
    const StepsLayout& layout_;
    std::size_t count_ = 0;
};

class FastSteps : public CollectiveCalls {
public:
    // `lay_out(verb, root, items, itemsize)` makes a StepsLayout, or None where the general way has to do it. `go_on(run, origin,
    // outcome, sequence, interrupt)` finishes what lasts, or raises. `ahead` counts the messages that wait on the lane.
    FastSteps(int rank, int ranks, Recorder& recorder, TurnLock& turn, const PlainArrays& arrays, nb::object kind_of,
              nb::object lay_out, nb::object go_on, nb::dict ahead, double timeout, WaitPolicy& policy, std::size_t piece)
        : CollectiveCalls(rank, ranks, recorder, turn, arrays, std::move(kind_of), timeout),
          lay_out_(std::move(lay_out)),
          go_on_(std::move(go_on)),
          ahead_(std::move(ahead)),
          policy_(policy),
          piece_(piece) {}

    nb::object barrier() { return run({Verb::barrier, -1, -1, -1, {}, 0}, {}, {}, Py_True, {}); }

    nb::object broadcast(nb::handle x, nb::handle src) {
        Array array;
        const int root = rank_of(src);
        if (root < 0 || !look(x, rank() != root, array)) return nb::none();
        return run({Verb::broadcast, root, code(array), -1, array.shape, array.bytes}, {x, array}, {}, x, {});
    }

    nb::object all_reduce(nb::handle x, nb::handle op) {
        Array array;
        Combine how;
        const int number = look(x, true, array) ? combine(array.dtype, op, how) : -1;
        if (number < 0) return nb::none();
        return run({Verb::all_reduce, -1, code(array), number, array.shape, array.bytes}, {x, array}, {}, x, how);
    }

    nb::object reduce(nb::handle x, nb::handle dst, nb::handle op) {
        Array array;
        Combine how;
        const int root = rank_of(dst);
        if (root < 0 || !look(x, rank() == root, array)) return nb::none();
        const int number = combine(array.dtype, op, how);
        if (number < 0) return nb::none();
        if (rank() != root) how.divisor = 1;
        return run({Verb::reduce, root, code(array), number, array.shape, array.bytes}, {x, array}, {}, x, how);
    }

    nb::object all_gather(nb::handle x, nb::handle out) {
        Array source, target;
        if (!look(x, false, source) || !look(out, true, target) || source.dtype != target.dtype) return nb::none();
        if (source.bytes * ranks() != target.bytes) return nb::none();
        if (!source.apart_from(target) && !source.is_part_of(target, rank())) return nb::none();
        return run({Verb::all_gather, -1, code(source), -1, source.shape, target.bytes}, {x, source}, {out, target}, out, {});
    }

    nb::object reduce_scatter(nb::handle x, nb::handle op, nb::handle out) {
        Array source, target;
        Combine how;
        if (!look(x, false, source) || !look(out, true, target) || source.dtype != target.dtype) return nb::none();
        if (!source.divides(ranks()) || source.bytes != target.bytes * ranks()) return nb::none();
        if (!source.apart_from(target) && !target.is_part_of(source, rank())) return nb::none();
        const int number = combine(source.dtype, op, how);
        if (number < 0) return nb::none();
        return run({Verb::reduce_scatter, -1, code(source), number, source.shape, source.bytes}, {x, source}, {out, target},
                   out, how);
    }

    nb::object all_to_all(nb::handle x, nb::handle out) {
        Array source, target;
        if (!look(x, false, source) || !look(out, true, target) || source.dtype != target.dtype) return nb::none();
        if (!source.divides(ranks()) || source.bytes != target.bytes || !source.apart_from(target)) return nb::none();
        return run({Verb::all_to_all, -1, code(source), -1, source.shape, source.bytes}, {x, source}, {out, target}, out, {});
    }

    // True on a rank that gets nothing: None would decline.
    nb::object gather(nb::handle x, nb::handle dst, nb::handle out) {
        Array source, target;
        const int root = rank_of(dst);
        if (root < 0 || !look(x, false, source)) return nb::none();
        const bool receives = rank() == root;
        if (receives) {
            if (!look(out, true, target) || source.dtype != target.dtype) return nb::none();
            if (source.bytes * ranks() != target.bytes) return nb::none();
            if (!source.apart_from(target) && !source.is_part_of(target, rank())) return nb::none();
        } else if (!out.is_none()) {
            return nb::none();
        }
        return run({Verb::gather, root, code(source), -1, source.shape, source.bytes * ranks()}, {x, source}, {out, target},
                   receives ? out : nb::handle(Py_True), {});
    }

    // The general way: the root tells what the parts are first.
    nb::object scatter(nb::handle, nb::handle, nb::handle) { return nb::none(); }

private:
    // A wait that lasts so long is handed over: signals are looked at there, and a lost connection is explained.
    static constexpr std::int64_t handover_ns = 50'000'000;
    static constexpr int sleep_ms = 2;  // so long may pass before a thread that wants a channel is seen
    static constexpr std::size_t short_bytes = 64 << 10;
    static constexpr std::size_t most_layouts = 256;

    struct Given {
        nb::handle object{};
        Array array{};
    };

    struct Key {
        Verb verb;
        int root;
        std::size_t bytes;
        std::size_t item;
        bool operator==(const Key&) const = default;
    };
    struct KeyHash {
        std::size_t operator()(const Key& key) const noexcept {
            return mix(key.bytes ^ mix(static_cast<std::uint64_t>(key.verb) << 40 ^ static_cast<std::uint64_t>(key.root) << 8 ^ key.item));
        }
    };

    struct TurnHeld {
        explicit TurnHeld(TurnLock& turn) noexcept : taken(turn.try_acquire()), turn_(turn) {}
        ~TurnHeld() {
            if (taken) turn_.release();
        }
        TurnHeld(const TurnHeld&) = delete;
        TurnHeld& operator=(const TurnHeld&) = delete;
        const bool taken;

    private:
        TurnLock& turn_;
    };

    static int code(const Array& array) noexcept { return static_cast<int>(array.dtype); }

    // None if there is none, or not yet.
    nb::object layout_of(const What& what) {
        const std::size_t item = what.dtype >= 0 ? item_size(static_cast<Dtype>(what.dtype)) : 1;
        const Key key{what.verb, what.root, what.bytes, item};
        const auto found = layouts_.find(key);
        if (found != layouts_.end()) return found->second;
        const nb::object made = in_interpreter([&] {
            return lay_out_(verb_names[static_cast<int>(what.verb)], std::max(what.root, 0), what.bytes / item, item);
        });
        if (!made.is_none()) {
            if (layouts_.size() >= most_layouts) layouts_.clear();
            layouts_.insert_or_assign(key, made);
        }
        return made;
    }

    nb::object run(const What& what, const Given& x, const Given& out, nb::handle result, const Combine& how) {
        const nb::object layout_object = paused == 0 ? layout_of(what) : nb::none();
        if (layout_object.is_none()) return nb::none();
        StepsLayout& layout = *nb::inst_ptr<StepsLayout>(layout_object);
        const std::uint64_t fixed = kind_of(what.verb, what.dtype, what.op);
        if (paused != 0 || ahead_.size() != 0) return nb::none();
        const TurnHeld turn(turn_);
        if (!turn.taken) return nb::none();
        Held held(layout, ended_, resting_);
        if (!held.all) return nb::none();
        std::unique_ptr<std::byte[]> scratch;
        if (layout.scratch > 0) scratch = std::make_unique_for_overwrite<std::byte[]>(layout.scratch);
        const std::array<std::byte*, 3> memory{x.array.data, out.array.data, scratch.get()};
        const std::uint64_t sequence = ++recorder_.sequence;
        const std::uint64_t fingerprint = fingerprint_for(fixed, sequence, what);
        Record& record = note(what, sequence, fingerprint);
        const std::int64_t began_ns = record.began_ns;
        std::unique_ptr<Steps> steps = layout.start(memory, fingerprint ^ layout.salt, how);
        Steps::Outcome outcome;
        {
            const WithoutGil released;
            layout.copy(memory);
            outcome = move(*steps, held, began_ns + std::min(handover_ns, timeout_ns_));
        }
        if (outcome == Steps::Outcome::done) {
            held.release();
            if (what.bytes <= short_bytes) layout.keep(std::move(steps));
        } else {
            for (std::size_t i = 0; i < layout.out.size(); ++i)
                if (steps->halfway(i)) layout.out[i].channel.attr("halfway") = true;
            held.release();
            if (record.sequence != sequence) note(what, sequence, fingerprint).began_ns = began_ns;  // the ring came round
            go_on(std::make_unique<Run>(std::move(steps), std::move(scratch), nb::borrow(x.object), nb::borrow(out.object), policy_),
                  layout, outcome, sequence, record);
        }
        if (how.divisor > 1) {
            const Array& target = what.verb == Verb::reduce_scatter ? out.array : x.array;
            divide(target.data, target.items, how.divisor, how.dtype);
        }
        if (record.sequence == sequence) record.ended_ns = monotonic_ns();
        return nb::borrow(result);
    }

    Steps::Outcome move(Steps& steps, const Held& held, std::int64_t until) const {
        Wait wait(policy_);
        for (;;) {
            const Steps::Outcome outcome = steps.move(wait, piece_);
            if (outcome != Steps::Outcome::blocked && outcome != Steps::Outcome::more) return outcome;
            if (held.wanted() || monotonic_ns() >= until) return outcome;
            if (outcome == Steps::Outcome::blocked) steps.sleep(sleep_ms);
        }
    }

    void go_on(std::unique_ptr<Run> run, const StepsLayout& layout, Steps::Outcome outcome, std::uint64_t sequence, Record& record) {
        nb::object interrupt = nb::none();
        if (PyErr_CheckSignals() != 0) interrupt = nb::borrow(nb::python_error().value());
        const nb::object held = nb::cast(run.release(), nb::rv_policy::take_ownership);
        try {
            in_interpreter([&] { return go_on_(held, layout.origin, static_cast<int>(outcome), sequence, interrupt); });
        } catch (const nb::python_error&) {
            if (record.sequence == sequence) record.ended_ns = monotonic_ns();
            throw;
        }
    }

    nb::object lay_out_, go_on_;
    nb::dict ahead_;
    WaitPolicy& policy_;
    const std::size_t piece_;
    nb::object ended_ = nb::steal(PyUnicode_InternFromString("ended"));
    nb::object resting_ = nb::steal(PyUnicode_InternFromString("resting"));
    std::unordered_map<Key, nb::object, KeyHash> layouts_;
};

}  // namespace

void phalanx::bind_fast_steps(nb::module_& m) {
    nb::class_<StepsLayout>(m, "StepsLayout", "A collective on arrays of one size; see phalanx.group.engines.steps.layout.")
        .def(nb::init<const Plan&, nb::list, nb::list, const std::vector<StepsLayout::Numbers>&, const std::vector<StepsLayout::Numbers>&,
                      std::size_t, std::uint64_t, nb::object>(),
             nb::arg("plan"), nb::arg("outbound"), nb::arg("inbound"), nb::arg("chunks"), nb::arg("copies"), nb::arg("scratch"),
             nb::arg("salt"), nb::arg("origin"));
    nb::class_<FastSteps>(m, "FastSteps", "The fast path of a group's collectives over TCP.")
        .def(nb::init<int, int, Recorder&, TurnLock&, const PlainArrays&, nb::object, nb::object, nb::object, nb::dict, double,
                      WaitPolicy&, std::size_t>(),
             nb::arg("rank"), nb::arg("ranks"), nb::arg("recorder"), nb::arg("turn"), nb::arg("arrays"), nb::arg("kind_of"),
             nb::arg("lay_out"), nb::arg("go_on"), nb::arg("ahead"), nb::arg("timeout"), nb::arg("policy"), nb::arg("piece"),
             nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 12>())
        .def_rw("paused", &FastSteps::paused)
        .def("barrier", &FastSteps::barrier)
        .def("broadcast", &FastSteps::broadcast, nb::arg().none(), nb::arg().none())
        .def("all_reduce", &FastSteps::all_reduce, nb::arg().none(), nb::arg().none())
        .def("reduce", &FastSteps::reduce, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("all_gather", &FastSteps::all_gather, nb::arg().none(), nb::arg().none())
        .def("gather", &FastSteps::gather, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("scatter", &FastSteps::scatter, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("reduce_scatter", &FastSteps::reduce_scatter, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("all_to_all", &FastSteps::all_to_all, nb::arg().none(), nb::arg().none());
}
