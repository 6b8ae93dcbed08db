// The collectives on arrays of a GPU, among ranks that share memory of the host.
//
// Short arrays go through that memory: a copy engine of the GPU brings them there, the ranks do what they do with any array
// (phalanx/collectives.hpp), and a copy engine takes the result back. No time slice of the GPU is needed. Where the program's
// stream is known, the copies are put on it. Then the last one is not waited for: whatever comes behind it on that stream
// finds the result.
//
// Longer ones of ranks that share a GPU are done by one kernel of the executor, rank 0:
// 1. Each rank waits until its arrays are computed.
// 2. All tell all where these lie: an all_gather in the segment, with fingerprint and deadline. A rank that is missing, or is
//    in another operation, is found out here, before anything is given to the GPU.
// 3. The executor launches a kernel that reads all inputs and writes all outputs, in the order of ranks. If it has not opened
//    the memory of the others yet, it asks them for the handles first.
// 4. It tells the others how that went.
// Of an array that the executor cannot open, a copy takes part that it can (stand_in.hpp).
// A rank that fails in between first makes sure that no kernel will write to its memory (flight.hpp).
//
// While the ranks' own kernels keep the GPU busy, the executor's has to wait for its turn. All ranks hear how long it took,
// and longer arrays go through the host for a while.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "flight.hpp"
#include "gpu.hpp"
#include "phalanx/collectives.hpp"
#include "plan.hpp"
#include "shared.hpp"
#include "stand_in.hpp"

namespace phalanx::cuda {

inline constexpr int executor = 0;

// Which way an array goes: the same on all ranks.
struct Routing {
    std::size_t short_bytes = 0;      // up to here through the host, unless the GPU is known to be idle
    std::size_t short_if_idle = 0;    // the same then; by the kernel also below where it spares each of many ranks two copies
    std::size_t short_if_busy = 0;    // the same while the ranks' own kernels keep it busy
    std::size_t short_if_closed = 0;  // the same if other processes cannot open the array
    std::int64_t slice_ns = 0;        // a kernel that had to wait for other processes takes longer than this
};

// Whether the GPU is busy, as seen by how long the executor's kernels took.
class Pace {
public:
    explicit Pace(std::int64_t slice_ns) : slice_ns_(slice_ns) {}

    bool busy() const noexcept { return left_ > 0; }

    // Whether a short array may go by the kernel.
    bool idle() const noexcept { return left_ == 0 && short_left_ == 0; }

    // A kernel that moved about so many bytes has taken so long.
    void executed(std::size_t bytes, std::int64_t ns) noexcept {
        if (ns > copies_ns + static_cast<std::int64_t>(bytes / bytes_per_ns))
            short_left_ = std::min(ns / worth_ns, longest_short);
        if (ns > slice_ns_ + static_cast<std::int64_t>(bytes / bytes_per_ns)) {
            left_ = next_;
            next_ = std::min(2 * next_, longest);
        } else {
            next_ = first;
        }
    }

    // An operation went through the host because of it.
    void went_round() noexcept { --left_; }
    // One of a short array did.
    void short_went_round() noexcept { short_left_ = std::max<std::int64_t>(short_left_ - 1, 0); }
    // The executor could not open one.
    void cannot_open_short() noexcept { short_left_ = unopened; }

private:
    // Two copies of a short array take no longer than this, whatever the GPU does. A kernel that took longer had to wait for
    // the kernels of other processes. So many short arrays go round then that its time is a few microseconds for each of them.
    static constexpr std::int64_t copies_ns = 60'000, worth_ns = 3'000, longest_short = 1 << 16;
    static constexpr std::int64_t first_short = 16, unopened = 1024;  // most groups do little
    static constexpr std::size_t bytes_per_ns = 1000;  // the least that a kernel moves, on any GPU that is not busy
    // Operations for which the answer holds; twice as many each time that it was right. Then the executor tries again.
    static constexpr int first = 4, longest = 256;
    std::int64_t slice_ns_;
    int left_ = 0, next_ = first;
    std::int64_t short_left_ = first_short;
};

// Memory of the host that copy engines can use, where it can be had in the segment.
class Staging {
public:
    using Take = std::function<std::byte*(std::size_t)>;           // null if there is no room
    using GiveBack = std::function<void(std::byte*, std::size_t)>;

    Staging(const Gpu& gpu, Take take, GiveBack give_back) : gpu_(gpu), take_(std::move(take)), give_back_(std::move(give_back)) {}
    ~Staging() { release(); }
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    bool fits(std::size_t bytes) const noexcept { return bytes <= size_; }

    std::byte* memory(std::size_t bytes) {
        if (fits(bytes)) return at_;
        release();
        const std::size_t size = std::bit_ceil(std::max(bytes, smallest));
        at_ = size <= largest ? take_(size) : nullptr;
        in_segment_ = at_ != nullptr;
        if (!in_segment_) at_ = static_cast<std::byte*>(std::aligned_alloc(page, size));
        if (at_ == nullptr) throw std::bad_alloc();
        size_ = size;
        constexpr unsigned portable = 1;
        registered_ = size <= largest && gpu_.driver.cuMemHostRegister_v2(at_, size, portable) == 0;
        return at_;
    }

    // What is so large is not kept.
    void trim() noexcept {
        if (size_ > largest) release();
    }

    // A copy that nobody waits for may write to it at any time: it is never given back.
    void abandon() noexcept {
        at_ = nullptr;
        size_ = 0;
    }

    void release() noexcept {
        if (at_ == nullptr) return;
        if (registered_) gpu_.driver.cuMemHostUnregister(at_);
        if (in_segment_)
            give_back_(at_, size_);
        else
            std::free(at_);
        at_ = nullptr;
        size_ = 0;
    }

    static constexpr std::size_t largest = 64 << 20;  // bytes that are kept

private:
    static constexpr std::size_t smallest = 64 << 10;

    const Gpu& gpu_;
    Take take_;
    GiveBack give_back_;
    std::byte* at_ = nullptr;
    std::size_t size_ = 0;
    bool in_segment_ = false, registered_ = false;
};

// A rank has given up an operation of this group before.
struct GivenUp : Error {
    GivenUp() : Error("", 0) {}
};

class DeviceCollectives {
public:
    // How the ranks share a GPU.
    struct Sharing {
        bool executes = false;       // one of them can open the memory of all others
        pid_t executors_process = 0;  // 0 if it is this one
        Address closed = 0;           // where the flight's word on the GPU is, here
    };
    using Kernels = std::function<std::vector<void*>()>;  // one for each Dtype

    DeviceCollectives(Segment& segment, Collectives& host, const Gpu& gpu, const Sharing& sharing, const Routing& routing,
                      Kernels kernels, const Staging::Take& take, const Staging::GiveBack& give_back)
        : s_(segment),
          host_(host),
          gpu_(gpu),
          executes_(sharing.executes && segment.ranks() <= most_ranks),
          closed_(sharing.closed),
          routing_(routing),
          load_kernels_(std::move(kernels)),
          sources_(gpu_, take, give_back),
          targets_(gpu_, take, give_back),
          flight_(segment.flight(), sharing.executors_process),
          exports_(gpu_),
          for_source_(gpu_),
          for_target_(gpu_),
          pace_(routing.slice_ns) {}

    ~DeviceCollectives() { close(); }

    // Gives back what it holds on the GPU.
    void close() noexcept {
        if (std::exchange(is_closed_, true)) return;
        try {
            const Gpu::Current current(gpu_);
            imports_.reset();
            settle();
            sources_.release();
            targets_.release();
            for_source_.release();
            for_target_.release();
        } catch (const Error&) {  // the context has ended, and all that was opened in it
            return;
        }
    }

    const Gpu& gpu() const noexcept { return gpu_; }

    // The ranks that an operation failed because of.
    std::vector<int> blamed(Outcome outcome) const {
        return outcome == Outcome::timed_out && own_fault_ ? std::vector<int>{s_.rank()} : host_.blamed(outcome);
    }

    // Runs an operation behind what the program's stream has to do. What comes behind it on that stream finds the result.
    // Throws Error.
    Outcome run_on(void* programs, const Call& call, const Operation& o) { return run(call, o, programs, false); }

    // Runs one on arrays that are computed. When it returns, it has ended on the GPU, too. Throws Error.
    Outcome run(const Call& call, const Operation& o) { return run(call, o, gpu_.stream, true); }

    // A scatter of equal parts whose length only the root knows, as `Collectives::tell_parts` and `take_part`. Arrays lie on the
    // GPU, or in the memory of the host: then the other address is 0. Without a target this rank takes nothing. `stream`: the
    // program's, or this group's if the arrays are computed.
    struct Whole {
        Address source = 0;
        std::byte* host_source = nullptr;
    };
    struct Part {
        Address target = 0;
        std::byte* host_target = nullptr;
    };

    // `whole` and `parts`: on the root. Throws Error.
    Outcome tell_parts(void* stream, const Call& given, Whole whole, Collectives::Parts parts, int root) {
        const Gpu::Current current(gpu_);
        const Call call = begun(given);
        const std::size_t bytes = ranks() * parts.bytes;
        if (rank() == root && whole.source != 0 && by_kernel(bytes)) {
            parts.where = Collectives::Where::on_gpu;
        } else if (rank() == root && whole.source != 0) {
            settle();
            whole.host_source = sources_.memory(bytes);
            if (const Outcome outcome = load(call, whole.host_source, whole.source, bytes, stream); outcome != Outcome::done)
                return outcome;
        }
        return host_.tell_parts(call, whole.host_source, parts, root);
    }

    // `whole`: on the root once more. What comes behind it on the program's stream finds the part; on the group's it has ended.
    // Throws Error.
    Outcome take_part(void* stream, const Call& given, const Whole& whole, const Part& part, int root) {
        const Gpu::Current current(gpu_);
        const Call call = begun(given);
        const std::size_t bytes = host_.told().bytes, all = ranks() * bytes;
        const bool known_ready = stream == gpu_.stream;
        if (host_.told().where == Collectives::Where::on_gpu) {
            Operation o{Kind::scatter, whole.source, rank() == root ? all : 0, part.target, part.target != 0 ? bytes : 0};
            o.root = root;
            o.counts = Lengths(bytes);
            o.largest = all;
            o.host_target = part.host_target;
            bool done = false;
            Outcome outcome = host_.take_part(call, nullptr);  // the end of the telling
            if (outcome == Outcome::done) outcome = execute(call, o, stream, known_ready, done);
            if (outcome != Outcome::done || done) return outcome;
            return bounce(call, o, stream, known_ready);
        }
        if (executes_ && all > routing_.short_bytes && pace_.busy()) pace_.went_round();
        if (part.target != 0) settle();
        std::byte* const taken = part.target == 0 ? part.host_target : targets_.memory(bytes);
        const Outcome outcome = host_.take_part(call, taken);
        if (outcome == Outcome::done) store(part.target, taken, part.target == 0 ? 0 : bytes, stream, known_ready);
        return outcome;
    }

private:
    static constexpr std::int64_t beyond_ns = 30'000'000'000;  // how long after its deadline a kernel or a copy is waited for
    static constexpr std::size_t kept = 1024;                  // operations whose launches are
    static constexpr int not_ready = 600;                      // CUDA_ERROR_NOT_READY
    static constexpr int eagerness = 20;  // of a wait for a kernel, which takes a millisecond at most

    Outcome run(const Call& given, const Operation& o, void* stream, bool known_ready) {
        const Gpu::Current current(gpu_);
        const Call call = begun(given);
        const bool is_short = o.largest <= routing_.short_bytes;
        if (is_short ? short_by_kernel(o) : by_kernel(o.largest)) {
            bool done = false;
            const Outcome outcome = execute(call, o, stream, known_ready, done);
            if (outcome != Outcome::done || done) return outcome;
            if (is_short) pace_.cannot_open_short();
        } else if (is_short) {
            pace_.short_went_round();
        } else if (executes_) {
            pace_.went_round();
        }
        return bounce(call, o, stream, known_ready);
    }

    Call begun(const Call& given) noexcept {
        Call call = given;
        call.bound.aborted = s_.abort_word();
        own_fault_ = false;
        return call;
    }

    // Whether the executor does an operation whose largest array has so many bytes: the same on all ranks.
    bool by_kernel(std::size_t largest) const noexcept {
        return executes_ && largest > routing_.short_bytes && (!pace_.busy() || largest > routing_.short_if_busy);
    }

    // The same of a short one. On an idle GPU a kernel takes 20 µs, however many ranks there are; the copies of 4 B take each
    // of two ranks a little longer, and the more of them copy at once, the longer.
    bool short_by_kernel(const Operation& o) const noexcept {
        if (!executes_ || !pace_.idle() || o.largest == 0) return false;
        const bool is_for_all = o.kind == Kind::all_reduce || o.kind == Kind::all_gather || o.kind == Kind::reduce_scatter ||
                                o.kind == Kind::all_to_all;
        return is_for_all || o.largest > routing_.short_if_idle;
    }

    int rank() const noexcept { return s_.rank(); }
    std::size_t ranks() const noexcept { return static_cast<std::size_t>(s_.ranks()); }

    // A wait that only this rank's GPU can be late for.
    Outcome own(Outcome outcome) noexcept {
        own_fault_ = outcome == Outcome::timed_out;
        return outcome;
    }

    // For what is on the stream and cannot be called back: it is waited for whatever happens.
    static Bound patient(const Call& call) noexcept {
        Bound bound;
        bound.deadline_ns = std::max(call.bound.deadline_ns, monotonic_ns()) + beyond_ns;
        return bound;
    }

    // -- through the memory of the host ---------------------------------------------------------------------------------------

    Outcome bounce(const Call& call, const Operation& o, void* stream, bool must_end) {
        const bool in_place = o.kind == Kind::broadcast || o.kind == Kind::all_reduce || o.kind == Kind::reduce;
        const bool is_root = o.root < 0 || o.root == rank();
        const bool reads = is_read(o) && o.host_source == nullptr;
        const bool writes = o.kind == Kind::scatter ? o.target != 0 : o.kind == Kind::broadcast ? !is_root : is_root;
        const std::size_t bytes = in_place ? o.source_bytes : o.target_bytes;
        // The copy before was put on the same stream, and so is waited for with the next one.
        if (!reads || stream != stored_on_ || !sources_.fits(o.source_bytes) || !targets_.fits(o.target_bytes)) settle();
        std::byte* const x = o.host_source != nullptr ? o.host_source : sources_.memory(o.source_bytes);
        std::byte* out = in_place ? x : targets_.memory(o.target_bytes);
        if (o.kind == Kind::scatter && o.target == 0) out = o.host_target;
        if (reads) {
            const Outcome outcome = load(call, x, o.source, o.source_bytes, stream);
            if (outcome != Outcome::done) return outcome;
            stored_ = false;
        }
        const Outcome outcome = on_host(call, o, x, out);
        if (outcome != Outcome::done) return outcome;
        must_end = must_end || o.source_bytes > Staging::largest;
        store(in_place ? o.source : o.target, out, writes ? bytes : 0, stream, must_end);
        return outcome;
    }

    // Whether this rank's source takes part in an operation, and not only its target.
    bool is_read(const Operation& o) const noexcept {
        return (o.kind != Kind::broadcast || o.root == rank()) && o.source_bytes > 0;
    }

    // Copies an array to the host, into `sources_`.
    Outcome load(const Call& call, std::byte* to, Address from, std::size_t bytes, void* stream) {
        if (bytes == 0) return Outcome::done;
        gpu_.to_host(to, from, bytes, stream);
        const Outcome outcome = own(wait_for_copy(stream, call.bound));
        if (outcome != Outcome::done) sources_.abandon();
        return outcome;
    }

    // Copies a result to the GPU, from `sources_` or `targets_`.
    void store(Address to, const std::byte* from, std::size_t bytes, void* stream, bool must_end) {
        if (bytes > 0) {
            gpu_.to_device(to, from, bytes, stream);
            gpu_.mark(stream);
            stored_ = true;
            stored_on_ = stream;
        }
        if (must_end || bytes > Staging::largest) settle();
        sources_.trim();
        targets_.trim();
    }

    // Waits for the copy that was put on a stream last. On a stream of the program's, another thread may put more behind it.
    Outcome wait_for_copy(void* stream, const Bound& bound) {
        if (stream == gpu_.stream) return gpu_.finish(bound);
        gpu_.mark(stream);
        return gpu_.wait_for_mark(bound);
    }

    // Waits for the last copy to the GPU: then its memory of the host can be used again.
    void settle() {
        if (!stored_) return;
        if (gpu_.wait_for_mark(patient({})) != Outcome::done) throw Error("cuEventQuery", not_ready);
        stored_ = false;
    }

    Outcome on_host(const Call& call, const Operation& o, std::byte* x, std::byte* out) {
        switch (o.kind) {
            case Kind::broadcast: return host_.broadcast(call, x, o.source_bytes, o.root);
            case Kind::all_reduce: return host_.all_reduce(call, x, o.source_bytes / item_size(o.how.dtype), o.how);
            case Kind::reduce: return host_.reduce(call, x, o.source_bytes / item_size(o.how.dtype), o.how, o.root);
            case Kind::all_gather: return host_.all_gather(call, x, out, o.counts);
            case Kind::gather: return host_.gather(call, x, out, o.counts, o.root);
            case Kind::reduce_scatter:
                return host_.reduce_scatter(call, x, out, o.target_bytes / item_size(o.how.dtype), o.how);
            case Kind::all_to_all: return host_.all_to_all(call, x, out, o.counts);
            case Kind::scatter: return host_.scatter(call, x, out, o.counts, o.root);
        }
        return Outcome::aborted;
    }

    // -- by one kernel --------------------------------------------------------------------------------------------------------

    // How the executor's part went, for the others.
    struct Report {
        enum Code : std::int64_t { done, wants_handles, cannot } code = done;
        std::int64_t ns = 0;  // that the kernel took
    };
    struct Places {
        Place source, target;
    };
    struct References {
        Reference source, target;
    };

    // `done` stays false if it cannot be done so, on all ranks alike; then nothing has happened.
    Outcome execute(const Call& call, const Operation& o, void* stream, bool known_ready, bool& done) {
        settle();
        if (!known_ready)
            if (const Outcome outcome = own(gpu_.wait_for(stream, call.bound)); outcome != Outcome::done) return outcome;
        try {
            const Outcome outcome = meet(call, o, done);
            if (outcome != Outcome::done) give_up();
            return outcome;
        } catch (const Error&) {
            give_up();
            throw;
        }
    }

    Outcome meet(const Call& call, const Operation& o, bool& done) {
        Standing standing;
        const Places mine = places_of(o, standing);
        Outcome outcome = own(copy_in(call, o, standing));
        if (outcome != Outcome::done) return outcome;
        places_.resize(ranks());
        outcome = all_gather(call, mine, places_);
        if (outcome != Outcome::done) return outcome;
        for (const Places& one : places_)
            if (one.source.buffer == 0 || one.target.buffer == 0) return outcome;  // not to be opened: seen by all
        Report report;
        if (rank() == executor) report = has_opened_all() ? fly(call, o) : Report{Report::wants_handles};
        if ((outcome = tell(call, report)) != Outcome::done) return outcome;
        if (report.code == Report::wants_handles) {
            const References told{reference(mine.source), reference(mine.target)};
            std::vector<References> all(ranks());
            if ((outcome = all_gather(call, told, all)) != Outcome::done) return outcome;
            if (rank() == executor) report = open_all(all) ? fly(call, o) : Report{Report::cannot};
            if ((outcome = tell(call, report)) != Outcome::done) return outcome;
        }
        done = report.code == Report::done;
        if (!done) return outcome;
        pace_.executed(o.largest, report.ns);
        copy_out(call, o, standing);
        return outcome;
    }

    // -- arrays that the executor cannot open -------------------------------------------------------------------------------

    // What stands in for the arrays of this rank; 0 for those that take part themselves.
    struct Standing {
        Address source = 0, target = 0;
    };

    // Where the arrays of this rank, or what stands in for them, lie for the executor.
    Places places_of(const Operation& o, Standing& standing) {
        const bool may_stand = o.largest > routing_.short_if_closed;
        Places mine{place_of(o.source, o.source_bytes, o.host_source, may_stand ? &for_source_ : nullptr, standing.source), {}};
        if (o.target == 0 && o.kind != Kind::scatter)
            mine.target = mine.source;
        else
            mine.target = place_of(o.target, o.target_bytes, o.host_target, may_stand ? &for_target_ : nullptr, standing.target);
        return mine;
    }

    Place place_of(Address array, std::size_t bytes, const std::byte* on_host, StandIn* other, Address& stands) {
        if (on_host != nullptr) return {};
        const bool is_opened = rank() != executor;
        const Place found = exports_.place_of(array, bytes, is_opened);
        if (found.buffer != 0 || !is_opened || other == nullptr) return found;
        stands = other->memory(bytes);
        return stands == 0 ? found : exports_.place_of(stands, bytes, is_opened);
    }

    Outcome copy_in(const Call& call, const Operation& o, const Standing& standing) {
        if (standing.source == 0 || !is_read(o)) return Outcome::done;
        gpu_.inside(standing.source, o.source, o.source_bytes);
        return gpu_.finish(call.bound);
    }

    void copy_out(const Call& call, const Operation& o, const Standing& standing) {
        const bool in_place = o.kind == Kind::all_reduce || (o.kind == Kind::reduce && o.root == rank()) ||
                              (o.kind == Kind::broadcast && o.root != rank());
        const Address written = in_place ? standing.source : standing.target;
        if (written == 0) return;
        gpu_.inside(in_place ? o.source : o.target, written, in_place ? o.source_bytes : o.target_bytes);
        if (gpu_.finish(patient(call)) != Outcome::done) throw Error("cuStreamQuery", not_ready);
    }

    template <class T>
    Outcome all_gather(const Call& call, const T& mine, std::vector<T>& all) {
        return host_.all_gather(call, reinterpret_cast<const std::byte*>(&mine), reinterpret_cast<std::byte*>(all.data()),
                                Lengths(sizeof(T)));
    }

    Outcome tell(const Call& call, Report& report) {
        Call eager = call;
        eager.bound.eagerness = eagerness;
        return host_.broadcast(eager, reinterpret_cast<std::byte*>(&report), sizeof(report), executor);
    }

    Reference reference(const Place& place) {
        return place.buffer == Place::nothing ? Reference{} : exports_.reference(place.buffer, place.address);
    }

    template <class Visit>
    void each_of_others(Visit visit) const {
        for (int r = 0; r < s_.ranks(); ++r)
            if (r != executor)
                for (const bool target : {false, true}) {
                    const Place& place = target ? places_[r].target : places_[r].source;
                    if (place.buffer != Place::nothing) visit(r, place, target);
                }
    }

    bool has_opened_all() const {
        bool all = imports_ != nullptr;
        each_of_others([&](int r, const Place& place, bool) { all = all && imports_->has(r, place); });
        return all;
    }

    bool open_all(const std::vector<References>& told) {
        if (imports_ == nullptr) imports_ = std::make_unique<Imports>(gpu_);
        bool all = true, closed = false;
        each_of_others([&](int r, const Place& place, bool target) {
            if (all && !imports_->has(r, place)) all = imports_->open(r, target ? told[r].target : told[r].source, closed);
        });
        if (closed) prepared_.clear();  // what they refer to may be closed
        return all;
    }

    // Launches the kernel and waits for its end.
    Report fly(const Call& call, const Operation& o) {
        const std::vector<Launch>& launches = prepared(o);
        if (!flight_.begin()) throw GivenUp();
        const std::int64_t began = monotonic_ns();
        try {
            for (const Launch& launch : launches) start(launch);
            land(call);
        } catch (const Error&) {
            land(call);  // the launches before the one that failed
            throw;
        }
        return {Report::done, monotonic_ns() - began};
    }

    // Waits until no kernel runs. One that never ends stays in flight.
    void land(const Call& call) {
        Outcome outcome = Outcome::done;
        try {
            outcome = gpu_.finish(patient(call));
        } catch (const Error&) {  // the context is broken, and nothing runs in it
            flight_.end();
            throw;
        }
        if (outcome != Outcome::done) throw Error("cuStreamQuery", not_ready);
        flight_.end();
    }

    void start(const Launch& launch) {
        void* parameter = const_cast<Plan*>(&launch.plan);
        check("cuLaunchKernel", gpu_.driver.cuLaunchKernel(kernels_[static_cast<std::size_t>(launch.dtype)], launch.blocks,
                                                          launch.pieces, 1, threads, 1, 1, 0, gpu_.stream, &parameter, nullptr));
    }

    // The launches of an operation; mostly it is like one before.
    const std::vector<Launch>& prepared(const Operation& o) {
        key_.clear();
        for (const std::uint64_t word :
             {static_cast<std::uint64_t>(o.kind), static_cast<std::uint64_t>(o.how.dtype), static_cast<std::uint64_t>(o.how.op),
              static_cast<std::uint64_t>(o.how.divisor), static_cast<std::uint64_t>(o.root), static_cast<std::uint64_t>(o.largest),
              static_cast<std::uint64_t>(o.source_bytes), static_cast<std::uint64_t>(o.target_bytes)})
            key_.push_back(word);
        for (const Places& one : places_) key_.insert(key_.end(), {one.source.buffer, one.source.address, one.target.buffer, one.target.address});
        const std::size_t parts = o.kind == Kind::all_to_all ? ranks() * ranks() : ranks();
        for (std::size_t i = 0; i < parts; ++i) key_.push_back(o.counts[static_cast<int>(i)]);
        const auto found = prepared_.find(key_);
        if (found != prepared_.end()) return found->second;
        if (kernels_.empty()) kernels_ = load_kernels_();
        std::vector<Address> sources, targets;
        for (int r = 0; r < s_.ranks(); ++r) {
            const auto at = [&](const Place& place) {
                if (place.buffer == Place::nothing) return Address{0};
                return r == executor ? place.address : imports_->at(r, place);
            };
            sources.push_back(at(places_[r].source));
            targets.push_back(at(places_[r].target));
        }
        std::vector<Piece> pieces = pieces_of(o, sources, targets);
        const Dtype dtype = o.combines() ? o.how.dtype : widen(pieces);
        if (prepared_.size() >= kept) prepared_.clear();
        return prepared_[key_] = launches_of(pieces, dtype, o.combines() ? o.how : Combine{}, closed_);
    }

    // After a failure: nobody writes to this rank's arrays any more.
    void give_up() noexcept {
        flight_.give_up([this] {
            try {
                auto* word = reinterpret_cast<std::uint32_t*>(sources_.memory(sizeof(std::uint32_t)));
                *word = ~std::uint32_t{0};
                gpu_.to_device(closed_, word, sizeof(*word), gpu_.stream);
                gpu_.finish(patient({}));
            } catch (...) {  // this rank's context is broken, and its arrays are gone with it
                return;
            }
        });
    }

    Segment& s_;
    Collectives& host_;
    const Gpu gpu_;
    const bool executes_;
    const Address closed_;
    const Routing routing_;
    Kernels load_kernels_;
    std::vector<void*> kernels_;
    Staging sources_, targets_;
    Flight flight_;
    Exports exports_;
    StandIn for_source_, for_target_;
    std::unique_ptr<Imports> imports_;
    Pace pace_;
    std::vector<Places> places_;  // of all ranks, in the operation under way
    std::vector<std::uint64_t> key_;
    std::map<std::vector<std::uint64_t>, std::vector<Launch>> prepared_;
    bool own_fault_ = false;
    bool is_closed_ = false;
    bool stored_ = false;        // a copy to the GPU may be under way
    void* stored_on_ = nullptr;  // and on which stream
};

}  // namespace phalanx::cuda
