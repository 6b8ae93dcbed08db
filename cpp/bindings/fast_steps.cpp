// The fast path of a group's collectives over TCP: a call on plain contiguous arrays of NumPy or torch, from the Group's method
// to the sockets without any Python in between. What is not as simple is declined with None, before anything has happened.
// What lasts, or goes wrong, is handed over where it stands: the general way (phalanx/group/engines/steps/run.py) knows about
// deadlines, lost ranks and interrupts.
//
// An asynchronous call is only issued here. The thread that waits for it does its steps as far as they go at once; all else
// is left to the group's own thread (phalanx/group/worker.py), because an interrupt of the waiting thread must not end it.

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "channel_lock.hpp"
#include "collective_calls.hpp"
#include "module.hpp"
#include "phalanx/shared_crew.hpp"
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
    std::unique_ptr<Steps> start(const std::array<std::byte*, 3>& memory, std::uint64_t fingerprint, const Combine& how,
                                 const std::shared_ptr<ScratchPool>& pool) {
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
            steps = std::make_unique<Steps>(plan_, std::move(fresh), out_fds_, in_fds_, watched_, fingerprint, how.dtype, how.op,
                                            pool);
        return steps;
    }

    void keep(std::unique_ptr<Steps> steps) noexcept { kept_ = std::move(steps); }

    // `helped(bytes, work)`: as `SharedCrew::share`.
    template <class Helped>
    void copy(const std::array<std::byte*, 3>& memory, Helped helped) const noexcept {
        for (const Piece& piece : copies_) {
            const std::byte* from = at(memory, piece.first);
            std::byte* to = at(memory, piece.second);
            if (from == to) continue;
            auto copy_part = [&](std::size_t begin, std::size_t size) { std::memcpy(to + begin, from + begin, size); };
            if (!helped(piece.size, copy_part)) copy_part(0, piece.size);
        }
    }

    // Whether there is nothing to do: what a leaf of a tree passes on.
    bool idle() const noexcept { return plan_->empty(); }

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
    // outcome, sequence, interrupt, seconds, ends)` finishes what lasts, or raises; `ends`: when the time of an asynchronous
    // one is over, else None. `take_part(out, slot, root, sequence, seconds)` takes a rank's part of a scatter, of which the
    // root has told what is in the slot, and raises if it does not fit. `do_all(verb, x, out, root, op, sequence, seconds,
    // ends)` does all of an asynchronous one the general way. `ahead` counts the messages that wait on the lane. So many of the
    // crew, if there is one, help to copy within this rank.
    FastSteps(int rank, int ranks, Recorder& recorder, TurnLock& turn, PlainArrays& arrays, nb::object kind_of,
              nb::object describe, nb::object lay_out, nb::object go_on, nb::object take_part, nb::object do_all,
              nb::dict ahead, double timeout, WaitPolicy& policy, std::size_t piece, SharedCrew* crew, int helpers)
        : CollectiveCalls(rank, ranks, recorder, turn, arrays, std::move(kind_of), std::move(describe), timeout),
          lay_out_(std::move(lay_out)),
          go_on_(std::move(go_on)),
          take_part_(std::move(take_part)),
          do_all_(std::move(do_all)),
          ahead_(std::move(ahead)),
          policy_(policy),
          piece_(piece),
          crew_(crew),
          helpers_(helpers) {
        slot_.object = slot_owner_;
        slot_.data = reinterpret_cast<std::byte*>(PyByteArray_AsString(slot_owner_.ptr()));
    }

    // Steps that are not done, and the scratch memory that they use.
    struct Rest {
        std::unique_ptr<Steps> steps;
        std::unique_ptr<std::byte[]> scratch;
        Steps::Outcome outcome;
    };

    // A collective that has its number, and where it was noted.
    struct Begun {
        const Operation& o;
        const CallSite& site;
        Record* record;
        std::int64_t began_ns;
        SlateWriter::Place place;
        Recorder& recorder;

        void end(bool failed = false) const {
            if (record->sequence == o.sequence)
                recorder.end(*record, monotonic_ns(), failed);
            else
                recorder.end(place, monotonic_ns(), failed);
        }
    };

    Begun begin(const Operation& o, const CallSite& site) {
        Record& record = note(o, site);
        return {o, site, &record, record.began_ns, record.place, recorder_};
    }

    // Begins an asynchronous collective and does its steps as far as they go now: true if that is to the end. Otherwise
    // `begun` and `rest` say where it stands; without `begun` nothing has happened, because its channels are not at rest.
    bool try_issued(const Operation& o, StepsLayout& layout, const CallSite& site, std::optional<Begun>& begun,
                    std::optional<Rest>& rest) {
        if (ahead_.size() != 0) return false;
        Held held(layout, ended_, resting_);
        if (!held.all) return false;
        begun.emplace(begin(o, site));
        rest = advance(*begun, layout, held, o.x, o.out, scratch_for(layout));
        if (rest.has_value()) return false;
        make_mean(o);
        begun->end();
        return true;
    }

    // Ends what `try_issued` could not, or raises.
    void finish_issued(const Operation& o, const StepsLayout& layout, const CallSite& site, std::optional<Begun>& begun,
                       std::optional<Rest>& rest) {
        const nb::object ends = nb::float_(static_cast<double>(o.deadline_ns) * 1e-9);
        if (begun.has_value()) {
            keep_noted(*begun);
            go_on(*begun, std::move(*rest), layout, ends, o.x, o.out);
            make_mean(o);
        } else {
            begun.emplace(begin(o, site));
            const char* const op = o.op >= 0 ? op_names[o.op] : "";
            const auto array = [](const Array& of) { return of.object.is_valid() ? nb::borrow(of.object) : nb::none(); };
            telling_failure(*begun, [&] {
                return do_all_(verb_names[static_cast<int>(o.verb)], array(o.x), array(o.out), o.root, op, o.sequence,
                               o.seconds(), ends);
            });
        }
        begun->end();
    }

protected:
    nb::object issue(Operation& o) override;

    bool run(Operation& o) override {
        if (paused != 0) return false;
        const bool tells = o.verb == Verb::scatter && rank() == o.root;
        const bool is_told = o.verb == Verb::scatter && !tells;
        // All that may run Python, before the turn is taken.
        const Told telling = tells ? telling_of(o) : Told{};
        if (telling.words.size() > room_for_words) return false;
        const nb::object layout_object = layout_of(o);
        const nb::object told_object = is_told ? layout_of_slot(o.root) : nb::none();
        if (layout_object.is_none() || (is_told && told_object.is_none())) return false;
        StepsLayout& layout = *nb::inst_ptr<StepsLayout>(layout_object);
        if (paused != 0 || ahead_.size() != 0) return false;
        const TurnHeld turn(turn_);
        if (!turn.taken) return false;
        Held held(layout, ended_, resting_);  // also the channel by which a rank hears what it is told
        if (!held.all) return false;
        give_number(o);
        const CallSite site = CallSite::current();
        Begun begun = begin(o, site);
        if (is_told) {
            StepsLayout& told = *nb::inst_ptr<StepsLayout>(told_object);
            const bool at_once = follow(begun, told, held, slot_, Array{}, nullptr);
            if (!at_once || !fits(o)) {
                held.release();
                take_part(begun);
                return true;
            }
            if (is_inside(head_of_slot())) std::memcpy(o.out.data, parts_in(slot_.data) + rank() * o.out.bytes, o.out.bytes);
        }
        std::unique_ptr<std::byte[]> scratch = scratch_for(layout);
        if (tells) fill(scratch.get(), telling, o);
        if (!layout.idle()) follow(begun, layout, held, is_told ? slot_ : o.x, o.out, std::move(scratch));
        make_mean(o);
        begun.end();
        return true;
    }

private:

    // What the root of a scatter tells first: the head, the words behind it, and at the end very short parts of all ranks. The
    // rest of the slot is not looked at, but sent: nothing of this process's memory must be in it. The same is in
    // phalanx/group/engines/slots.py.
    struct PartsHead {
        std::uint64_t bytes = 0, kind = 0, words = 0;
    };
    struct Told {
        std::uint64_t kind = 0;
        std::string words{};
    };
    static constexpr std::size_t slot_bytes = 128, room_for_words = 56, room_for_parts = 48;
    static_assert(sizeof(PartsHead) + room_for_words + room_for_parts == slot_bytes);

    Told telling_of(const Operation& o) {
        return {kind_of(Verb::scatter, static_cast<int>(o.x.dtype), -1), words_of(o.x)};
    }

    void fill(std::byte* slot, const Told& telling, const Operation& o) const noexcept {
        const PartsHead head{o.out.bytes, telling.kind, telling.words.size()};
        std::memset(slot, 0, slot_bytes);
        std::memcpy(slot, &head, sizeof head);
        std::memcpy(slot + sizeof head, telling.words.data(), telling.words.size());
        if (is_inside(head)) std::memcpy(parts_in(slot), o.x.data, ranks() * o.out.bytes);
    }

    bool is_inside(const PartsHead& head) const noexcept {
        return head.bytes <= room_for_parts / static_cast<std::size_t>(ranks());
    }

    static std::byte* parts_in(std::byte* slot) noexcept { return slot + slot_bytes - room_for_parts; }

    PartsHead head_of_slot() const noexcept {
        PartsHead head;
        std::memcpy(&head, slot_.data, sizeof head);
        return head;
    }

    // Whether the part that the root has told of is what this rank takes.
    bool fits(const Operation& o) {
        const PartsHead head = head_of_slot();
        return head.bytes == o.out.bytes && head.kind == kind_of(Verb::scatter, static_cast<int>(o.out.dtype), -1);
    }

    static std::unique_ptr<std::byte[]> scratch_for(const StepsLayout& layout) {
        return layout.scratch > 0 ? std::make_unique_for_overwrite<std::byte[]>(layout.scratch) : nullptr;
    }

    // Of a sum, where a mean was asked for.
    void make_mean(const Operation& o) const noexcept {
        if (o.how.divisor <= 1 || (o.root >= 0 && rank() != o.root)) return;
        const Array& target = o.verb == Verb::reduce_scatter ? o.out : o.x;
        divide(target.data, target.items, o.how.divisor, o.how.dtype);
    }

    // Does the steps of a layout on these arrays. False if they lasted, and were finished in Python: then the channels are not
    // held any more.
    bool follow(Begun& begun, StepsLayout& layout, Held& held, const Array& x, const Array& out,
                std::unique_ptr<std::byte[]> scratch) {
        std::optional<Rest> rest = advance(begun, layout, held, x, out, std::move(scratch));
        if (!rest.has_value()) return true;
        keep_noted(begun);
        go_on(begun, std::move(*rest), layout, nb::none(), x, out);
        return false;
    }

    // The same as far as it goes now. If there is a rest, the channels are not held any more.
    std::optional<Rest> advance(const Begun& begun, StepsLayout& layout, Held& held, const Array& x, const Array& out,
                                std::unique_ptr<std::byte[]> scratch) {
        const Operation& o = begun.o;
        const std::array<std::byte*, 3> memory{x.data, out.data, scratch.get()};
        std::unique_ptr<Steps> steps = layout.start(memory, o.fingerprint ^ layout.salt, o.how, pool_);
        Steps::Outcome outcome;
        {
            const WithoutGil released;
            layout.copy(memory, [this](std::size_t bytes, auto& work) {
                return crew_ != nullptr && crew_->share(bytes, helpers_, worth_helping, work);
            });
            outcome = move(*steps, held, begun.began_ns + std::min(handover_ns, o.timeout_ns));
        }
        if (outcome == Steps::Outcome::done) {
            if (o.bytes <= short_bytes) layout.keep(std::move(steps));
            return std::nullopt;
        }
        for (std::size_t i = 0; i < layout.out.size(); ++i)
            if (steps->halfway(i)) layout.out[i].channel.attr("halfway") = true;
        held.release();
        return Rest{std::move(steps), std::move(scratch), outcome};
    }

    void keep_noted(Begun& begun) {
        if (begun.record->sequence == begun.o.sequence) return;
        begun.record = &note(begun.o, begun.site, &begun.place);  // the ring came round
        begun.record->began_ns = begun.began_ns;
    }

    // A wait that lasts so long is handed over: signals are looked at there, and a lost connection is explained.
    static constexpr std::int64_t handover_ns = 50'000'000;
    static constexpr int sleep_ms = 2;  // so long may pass before a thread that wants a channel is seen
    static constexpr std::size_t short_bytes = 64 << 10;
    static constexpr std::size_t worth_helping = 1 << 20;  // of a copy
    static constexpr std::size_t most_layouts = 256;

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

    static nb::object kept(const Array& array) { return array.object.is_valid() ? nb::borrow(array.object) : nb::object(); }

    // None if there is none, or not yet.
    nb::object layout_of(const Operation& o) {
        const std::size_t item = o.dtype >= 0 ? item_size(static_cast<Dtype>(o.dtype)) : 1;
        return layout_of({o.verb, o.root, o.bytes, item}, verb_names[static_cast<int>(o.verb)]);
    }

    // Of what comes before the part of a scatter. No array has elements of no size.
    nb::object layout_of_slot(int root) { return layout_of({Verb::scatter, root, slot_bytes, 0}, "scatter_slot"); }

    nb::object layout_of(const Key& key, const char* verb) {
        const auto found = layouts_.find(key);
        if (found != layouts_.end()) return found->second;
        const std::size_t item = std::max<std::size_t>(key.item, 1);
        const nb::object made = in_interpreter([&] { return lay_out_(verb, std::max(key.root, 0), key.bytes / item, item); });
        if (!made.is_none()) {
            if (layouts_.size() >= most_layouts) layouts_.clear();
            layouts_.insert_or_assign(key, made);
        }
        return made;
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

    void go_on(const Begun& begun, Rest rest, const StepsLayout& layout, const nb::object& ends, const Array& x, const Array& out) {
        const Operation& o = begun.o;
        nb::object interrupt = nb::none();
        if (PyErr_CheckSignals() != 0) interrupt = nb::borrow(nb::python_error().value());
        const int outcome = static_cast<int>(rest.outcome);
        auto run = std::make_unique<Run>(std::move(rest.steps), std::move(rest.scratch), kept(x), kept(out), policy_);
        const nb::object held = nb::cast(run.release(), nb::rv_policy::take_ownership);
        telling_failure(
            begun, [&] { return go_on_(held, layout.origin, outcome, o.sequence, interrupt, o.seconds(), ends); });
    }

    template <class Job>
    static void telling_failure(const Begun& begun, const Job& job) {
        try {
            in_interpreter(job);
        } catch (const nb::python_error&) {
            begun.end(true);
            throw;
        }
    }

    // In Python: what the root has told is here, but the part may last as well, or needs other memory.
    void take_part(Begun& begun) {
        const Operation& o = begun.o;
        keep_noted(begun);
        telling_failure(begun, [&] {
            return take_part_(o.out.object, nb::bytes(slot_.data, slot_bytes), o.root, o.sequence, o.seconds());
        });
        begun.end();
    }

    nb::object lay_out_, go_on_, take_part_, do_all_;
    nb::object slot_owner_ = nb::steal(PyByteArray_FromStringAndSize(nullptr, slot_bytes));
    Array slot_;  // what the root of a scatter tells
    nb::dict ahead_;
    WaitPolicy& policy_;
    const std::size_t piece_;
    SharedCrew* const crew_;
    const int helpers_;
    const std::shared_ptr<ScratchPool> pool_ = std::make_shared<ScratchPool>();
    nb::object ended_ = nb::steal(PyUnicode_InternFromString("ended"));
    nb::object resting_ = nb::steal(PyUnicode_InternFromString("resting"));
    std::unordered_map<Key, nb::object, KeyHash> layouts_;
};

// An asynchronous collective: it has its number and its deadline, and runs when those that were issued before have ended.
class IssuedSteps {
public:
    IssuedSteps(FastSteps& path, const Operation& operation, nb::object layout)
        : path_(path),
          owner_(nb::find(path)),
          layout_owner_(std::move(layout)),
          layout_(*nb::inst_ptr<StepsLayout>(layout_owner_)),
          x_(kept(operation.x.object)),
          out_(kept(operation.out.object)),
          operation_(operation),
          site_(CallSite::current()),
          result_(operation.result.is_valid() ? nb::borrow(operation.result) : nb::none()) {}

    // Does what can be done at once. False if that was not all, or if another thread is at it.
    bool run() {
        if (ended_ || running_ || left_) return ended_;
        const Busy busy(running_);
        if (path_.try_issued(operation_, layout_, site_, begun_, rest_))
            end();
        else
            left_ = true;
        return ended_;
    }

    // Runs it to its end. False if another thread is at it. Only in the group's own thread, which no signal handler interrupts.
    bool run_to_end() {
        if (run() || running_) return ended_;
        const Busy busy(running_);
        try {
            path_.finish_issued(operation_, layout_, site_, begun_, rest_);
        } catch (const nb::python_error& raised) {
            error_ = nb::borrow(raised.value());
        }
        end();
        return true;
    }

    // As `run`; true only if it has ended without an error.
    bool run_well() { return run() && error_.is_none(); }

    std::size_t bytes() const noexcept { return operation_.bytes; }
    double remaining() const noexcept {
        return std::max(0.0, static_cast<double>(operation_.deadline_ns - monotonic_ns()) * 1e-9);
    }
    nb::object result() const { return error_.is_none() ? result_ : nb::none(); }
    nb::object error() const { return error_; }

private:
    struct Busy {
        explicit Busy(bool& flag) noexcept : flag_(flag) { flag_ = true; }
        ~Busy() { flag_ = false; }
        Busy(const Busy&) = delete;
        Busy& operator=(const Busy&) = delete;

    private:
        bool& flag_;
    };

    static nb::object kept(nb::handle array) { return array.is_valid() ? nb::borrow(array) : nb::object(); }

    void end() {
        ended_ = true;
        x_.reset();
        out_.reset();
    }

    FastSteps& path_;
    nb::object owner_;  // of the path
    nb::object layout_owner_;
    StepsLayout& layout_;
    nb::object x_, out_;  // whose memory it is
    Operation operation_;
    CallSite site_;
    std::optional<FastSteps::Begun> begun_;
    std::optional<FastSteps::Rest> rest_;
    nb::object result_, error_ = nb::none();
    bool running_ = false, left_ = false, ended_ = false;
};

nb::object FastSteps::issue(Operation& o) {
    if (o.verb == Verb::scatter) return nb::none();  // the others do not know yet what comes
    nb::object layout = layout_of(o);
    if (layout.is_none()) return nb::none();
    give_number(o);
    o.deadline_ns = monotonic_ns() + o.timeout_ns;
    return nb::cast(new IssuedSteps(*this, o, std::move(layout)), nb::rv_policy::take_ownership);
}

}  // namespace

void phalanx::bind_fast_steps(nb::module_& m) {
    nb::class_<StepsLayout>(m, "StepsLayout", "A collective on arrays of one size; see phalanx.group.engines.steps.layout.")
        .def(nb::init<const Plan&, nb::list, nb::list, const std::vector<StepsLayout::Numbers>&, const std::vector<StepsLayout::Numbers>&,
                      std::size_t, std::uint64_t, nb::object>(),
             nb::arg("plan"), nb::arg("outbound"), nb::arg("inbound"), nb::arg("chunks"), nb::arg("copies"), nb::arg("scratch"),
             nb::arg("salt"), nb::arg("origin"));
    nb::class_<FastSteps> path(m, "FastSteps", "The fast path of a group's collectives over TCP.");
    path.def(nb::init<int, int, Recorder&, TurnLock&, PlainArrays&, nb::object, nb::object, nb::object, nb::object, nb::object,
                      nb::object, nb::dict, double, WaitPolicy&, std::size_t, SharedCrew*, int>(),
             nb::arg("rank"), nb::arg("ranks"), nb::arg("recorder"), nb::arg("turn"), nb::arg("arrays"), nb::arg("kind_of"),
             nb::arg("describe"), nb::arg("lay_out"), nb::arg("go_on"), nb::arg("take_part"), nb::arg("do_all"),
             nb::arg("ahead"), nb::arg("timeout"), nb::arg("policy"), nb::arg("piece"), nb::arg("crew").none(), nb::arg("helpers"),
             nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 15>(), nb::keep_alive<1, 17>());
    bind_verbs(path);
    nb::class_<IssuedSteps>(m, "IssuedSteps", "An asynchronous collective over TCP; see phalanx.group.worker.")
        .def_prop_ro("bytes", &IssuedSteps::bytes)
        .def_prop_ro("remaining", &IssuedSteps::remaining)
        .def_prop_ro("result", &IssuedSteps::result)
        .def_prop_ro("error", &IssuedSteps::error)
        .def("run", &IssuedSteps::run)
        .def("run_well", &IssuedSteps::run_well)
        .def("run_to_end", &IssuedSteps::run_to_end);
}
