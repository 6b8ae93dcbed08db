// The fast path of a group's collectives: a call on plain contiguous arrays of NumPy or torch, from the Group's method into the
// segment without any Python in between. What is not as simple is declined with None, before anything has happened, and goes
// the general way (phalanx/group/collective_runner.py).
//
// An asynchronous call is only issued here. It runs later, in the thread that waits for it or in the group's own
// (phalanx/group/worker.py).
//
// Arrays on a GPU are taken once all ranks have agreed on how they share it (phalanx/group/engines/cuda/engine.py).
//
// On MPI (phalanx/group/engines/mpi/engine.py) the segment only makes sure that all ranks have come and mean the same; then
// MPI's own function is called.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "alarm.hpp"
#include "collective_calls.hpp"
#include "device.hpp"
#include "gil.hpp"
#include "module.hpp"
#include "mpi_calls.hpp"
#include "phalanx/objects.hpp"
#include "shared_segment.hpp"
#include "work_queue.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

// How an operation has ended.
struct Ending {
    Outcome outcome = Outcome::done;
    nb::object interrupt = nb::none();  // what a signal handler has raised; a number is an error of MPI's
    nb::object blamed{};                // of a failure
};

class FastPath : public CollectiveCalls {
public:
    // `failed(outcome, sequence, blamed, interrupt, seconds, later)` raises what it means that an operation, which had so many
    // seconds, did not go well. `misfit(out, words, root)` raises what it means that the parts of a scatter do not fit.
    // `mpi`: None where the segment moves the data.
    FastPath(SharedSegment& segment, Recorder& recorder, TurnLock& turn, PlainArrays& arrays, nb::object kind_of,
            nb::object failed, nb::object describe, nb::object misfit, double timeout, nb::object mpi)
        : CollectiveCalls(segment.segment.rank(), segment.segment.ranks(), recorder, turn, arrays, std::move(kind_of),
                          std::move(describe), timeout),
          s_(segment),
          failed_(std::move(failed)),
          misfit_(std::move(misfit)),
          mpi_owner_(std::move(mpi)),
          mpi_(mpi_owner_.is_none() ? nullptr : nb::cast<MpiCalls*>(mpi_owner_)) {}

    // What only a scatter needs.
    struct Parts {
        std::uint64_t kind = 0;  // a number for the type of their elements
        std::string words{};     // what the root says of them
        std::string told{};      // what it has said of parts that do not fit
        bool fit = true;
    };

    Parts parts_of(const Operation& o) {
        Parts parts;
        if (o.verb != Verb::scatter) return parts;
        parts.kind = kind_of(Verb::scatter, static_cast<int>(o.out.dtype), -1);
        if (rank() == o.root) parts.words = words_of(o.x);
        return parts;
    }

    // Runs an operation that has its number. Only one that is `resumable` may end as interrupted without having failed: it is
    // to run again.
    Ending perform(Operation& o, Parts& parts, const CallSite& site, bool resumable) {
        Record& record = note(o, site);
        const std::int64_t began_ns = record.began_ns;
        const SlateWriter::Place place = record.place;
        if (o.deadline_ns == 0) o.deadline_ns = began_ns + o.timeout_ns;
        PyThreadState* state = nullptr;
        Call call;
        call.fingerprint = o.fingerprint;
        call.bound.deadline_ns = o.deadline_ns;
        call.bound.interrupted = signal_raised;
        call.bound.resumable = resumable;
        call.bound.held = &state;
        Ending end;
        if (by_device(o)) {
            try {
                end_without_memory(end, [&] {
                    const WithoutGil released;
                    return o.verb == Verb::scatter ? scatter_by_device(o, parts, call)
                                                   : device_->ops.run_on(o.x.stream, call, on_device(o));
                });
            } catch (const cuda::Error& error) {
                end.interrupt = device_->exception_of(error);
                end.outcome = Outcome::interrupted;
            }
        } else if (o.bytes <= worth_holding || mpi_ != nullptr || o.objects != nullptr) {
            // Most short operations are done before another thread could make use of the GIL.
            call.bound.before_long = [](void* held) { *static_cast<PyThreadState**>(held) = PyEval_SaveThread(); };
            call.bound.after_long = [](void* held) { take_gil(*static_cast<PyThreadState**>(held)); };
            end_without_memory(end, [&] {
                return o.objects != nullptr ? static_cast<ObjectCall*>(o.objects)->run(o, call)
                       : mpi_ == nullptr    ? in_segment(o, parts, call)
                                            : s_.ops.barrier(call);
            });
        } else {
            end_without_memory(end, [&] {
                const WithoutGil released;
                return in_segment(o, parts, call);
            });
        }
        if (mpi_ != nullptr && !by_device(o) && end.outcome == Outcome::done) {
            int error = 0;
            mpi_->enter(o.sequence, o.seconds());
            {
                // Always: should this thread be stuck in there, others must be able to say so.
                const WithoutGil released;
                error = by_mpi(o);
            }
            mpi_->leave();
            if (error != 0) {
                end.interrupt = nb::int_(error);
                end.outcome = Outcome::interrupted;
            }
        }
        const bool kept = record.sequence == o.sequence;  // the ring may have come round
        if (kept)
            recorder_.end(record, monotonic_ns(), end.outcome != Outcome::done);
        else
            recorder_.end(place, monotonic_ns(), end.outcome != Outcome::done);
        if (end.outcome == Outcome::done) return end;
        if (end.outcome == Outcome::interrupted && end.interrupt.is_none()) {
            end.interrupt = nb::borrow(nb::python_error().value());
            if (resumable) return end;
        }
        if (!kept) {  // an error has to say what failed
            Record& again = note(o, site, &place);
            again.began_ns = began_ns;
            again.ended_ns = monotonic_ns();  // on the slate it has ended before
        }
        // Before another thread's operation changes it.
        end.blamed = nb::cast(by_device(o) ? device_->ops.blamed(end.outcome) : s_.ops.blamed(end.outcome));
        bool detached = false;
        {
            const WithoutGil released;
            detached = s_.detach({{o.x.data, o.x.bytes}, {o.out.data, o.out.bytes}});
        }
        if (!detached && end.interrupt.is_none()) end.interrupt = nb::borrow(PyExc_MemoryError)();
        return end;
    }

    // There may be no memory for an object that is long, or for what threads need that help with a sum. The others are in the
    // middle of the operation then: it has failed for all.
    template <class Operate>
    static void end_without_memory(Ending& end, Operate operate) {
        try {
            end.outcome = operate();
        } catch (const std::bad_alloc&) {
            end.interrupt = nb::borrow(PyExc_MemoryError)();
            end.outcome = Outcome::interrupted;
        }
    }

    // Raises what it means that an operation has not gone well.
    void check(const Operation& o, const Parts& parts, const Ending& end, bool later) const {
        if (end.outcome != Outcome::done) {
            in_interpreter([&] {
                return failed_(static_cast<int>(end.outcome), o.sequence, end.blamed, end.interrupt, o.seconds(), later);
            });
            throw std::logic_error("an operation failed, and nobody said so");
        }
        if (!parts.fit) in_interpreter([&] { return misfit_(o.out.object, nb::bytes(parts.told.data(), parts.told.size()), o.root); });
    }

    // Objects as the codec writes them, (length of the structure, bytes). None: declined, nothing has happened.

    // `mine`: on the root. The object on all others, True on the root.
    nb::object broadcast_object(nb::handle src, nb::handle mine, nb::handle timeout) {
        Operation o{Verb::broadcast_object};
        o.root = rank_of(src);
        if (o.root < 0 || (rank() == o.root) == mine.is_none()) return nb::none();
        ObjectCall call(*this);
        if (!mine.is_none()) call.add(mine);
        if (!call.start(o, timeout)) return nb::none();
        return rank() == o.root ? nb::object(nb::bool_(true)) : call.found(0);
    }

    // A list of all.
    nb::object all_gather_object(nb::handle mine, nb::handle timeout) {
        Operation o{Verb::all_gather_object};
        ObjectCall call(*this);
        call.add(mine);
        return call.start(o, timeout) ? call.all_found() : nb::none();
    }

    // The same on the root, True on all others.
    nb::object gather_object(nb::handle dst, nb::handle mine, nb::handle timeout) {
        Operation o{Verb::gather_object};
        o.root = rank_of(dst);
        if (o.root < 0) return nb::none();
        ObjectCall call(*this);
        call.add(mine);
        if (!call.start(o, timeout)) return nb::none();
        return rank() == o.root ? call.all_found() : nb::object(nb::bool_(true));
    }

    // `each`: on the root, a list with one for each rank. The object on all others, True on the root.
    nb::object scatter_object(nb::handle src, nb::handle each, nb::handle timeout) {
        Operation o{Verb::scatter_object};
        o.root = rank_of(src);
        if (o.root < 0 || (rank() == o.root) == each.is_none()) return nb::none();
        ObjectCall call(*this);
        if (!each.is_none()) {
            if (static_cast<int>(nb::len(each)) != ranks()) return nb::none();
            for (nb::handle one : each) call.add(one);
        }
        if (!call.start(o, timeout)) return nb::none();
        return rank() == o.root ? nb::object(nb::bool_(true)) : call.found(0);
    }

    // MPI's functions take one array.
    bool takes_parts() const noexcept override { return mpi_ == nullptr; }

    nb::object device() const { return device_owner_; }
    void use_device(nb::object device) {
        device_ = device.is_none() ? nullptr : nb::cast<DeviceGroup*>(device);
        device_owner_ = std::move(device);
    }

protected:
    bool takes(const Operation& o) const override {
        if (o.on_gpu) return !device_->ops.gpu().is_capturing(stream_of(o));
        if (moves_objects(o.verb)) return mpi_ == nullptr;
        if (o.x.parts != nullptr && by_device(o)) return false;
        if (mpi_ == nullptr || o.verb == Verb::barrier) return true;
        if (o.verb == Verb::gather || o.verb == Verb::scatter || !o.x.apart_from(o.out)) return false;
        const std::size_t items = std::max(o.x.items, o.out.items);
        return o.op >= 0 ? mpi_->can_combine(o.x.dtype, o.op, items) : mpi_->can_move(o.x.dtype, items);
    }

    bool run(Operation& o) override {
        Parts parts = parts_of(o);
        if (paused != 0 || s_.segment.aborted() || !turn_.try_acquire()) return false;
        give_number(o);
        const Ending end = perform(o, parts, CallSite::current(), false);
        turn_.release();
        check(o, parts, end, false);
        return true;
    }

    nb::object issue(Operation& o) override;
    bool adds_at_once() const noexcept override { return mpi_ == nullptr; }
    int own_gpu() const noexcept override { return device_ == nullptr ? -1 : device_->ops.gpu().number; }

private:
    // One collective on objects: what this rank gives, and what came.
    class ObjectCall {
    public:
        explicit ObjectCall(FastPath& path) : path_(path), moves_(path.s_.ops, path.rank(), path.ranks()) {}

        void add(nb::handle encoded) {
            const auto words = nb::cast<nb::tuple>(encoded);
            kept_.push_back(nb::cast<nb::bytes>(words[1]));
            const auto* const data = reinterpret_cast<const std::byte*>(kept_.back().c_str());
            given_.push_back({nb::cast<std::uint64_t>(words[0]), {data, kept_.back().size()}});
        }

        bool start(Operation& o, nb::handle timeout) {
            o.objects = this;
            for (const EncodedObject& one : given_) o.bytes += one.bytes.size();
            return !path_.start(o, timeout, false).is_none();
        }

        Outcome run(const Operation& o, const Call& call) {
            const auto second = [&](std::size_t bytes, auto steps) {
                Call rest = call.once_met();
                rest.bound.before_long = rest.bound.after_long = nullptr;
                everything_ = nb::steal(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
                if (!everything_.is_valid()) {
                    PyErr_Clear();
                    throw std::bad_alloc();
                }
                expect_long(room(), bytes);
                const WithoutGil released;  // long objects are long copied
                return steps(rest, room());
            };
            switch (o.verb) {
                case Verb::broadcast_object:
                    return moves_.broadcast(call, given_.empty() ? EncodedObject{} : given_[0], o.root, second);
                case Verb::scatter_object: return moves_.scatter(call, given_, o.root, second);
                default: return moves_.gather(call, given_[0], o.root, second);
            }
        }

        // Of a long one, a view of the memory that it came to.
        nb::object found(int i) const {
            const EncodedObject& one = moves_.found()[i];
            if (!everything_.is_valid())
                return nb::make_tuple(one.head, nb::bytes(reinterpret_cast<const char*>(one.bytes.data()), one.bytes.size()));
            const Py_ssize_t start = one.bytes.data() - room();
            const nb::object all = nb::steal(PyMemoryView_FromObject(everything_.ptr()));
            return nb::make_tuple(one.head, nb::steal(PySequence_GetSlice(all.ptr(), start, start + static_cast<Py_ssize_t>(one.bytes.size()))));
        }
        nb::object all_found() const {
            nb::list all;
            for (int r = 0; r < path_.ranks(); ++r) all.append(found(r));
            return all;
        }

    private:
        std::byte* room() const { return reinterpret_cast<std::byte*>(PyByteArray_AsString(everything_.ptr())); }

        FastPath& path_;
        ObjectMoves moves_;
        nb::object everything_;  // a bytearray that long objects came to
        std::vector<nb::bytes> kept_;
        std::vector<EncodedObject> given_;
    };

    // Of a scatter, only the root knows where its array lies.
    bool by_device(const Operation& o) const noexcept { return o.on_gpu || (o.verb == Verb::scatter && device_ != nullptr); }

    static void* stream_of(const Operation& o) noexcept { return o.x.object.is_valid() ? o.x.stream : o.out.stream; }

    cuda::Operation on_device(const Operation& o) const {
        using cuda::Kind;
        const auto address = [](const Array& array) { return reinterpret_cast<cuda::Address>(array.data); };
        cuda::Operation made{Kind::all_reduce, address(o.x), o.x.bytes, address(o.out), o.out.bytes, o.how, o.root, Lengths(0), o.bytes};
        switch (o.verb) {
            case Verb::broadcast: made.kind = Kind::broadcast; break;
            case Verb::all_reduce: break;
            case Verb::reduce: made.kind = Kind::reduce; break;
            case Verb::all_gather: made.kind = Kind::all_gather; break;
            case Verb::gather: made.kind = Kind::gather; break;
            case Verb::reduce_scatter: made.kind = Kind::reduce_scatter; break;
            case Verb::all_to_all: made.kind = Kind::all_to_all; break;
            default: throw std::logic_error("an operation that no GPU does");
        }
        const bool gathers = o.verb == Verb::all_gather || o.verb == Verb::gather;
        if (gathers) made.counts = Lengths(o.x.bytes);
        if (o.verb == Verb::all_to_all) made.counts = Lengths(o.x.bytes / ranks());
        return made;
    }

    Outcome in_segment(const Operation& o, Parts& parts, const Call& call) {
        Collectives& segment = s_.ops;
        switch (o.verb) {
            case Verb::barrier: return segment.barrier(call);
            case Verb::broadcast: return segment.broadcast(call, o.x.data, o.x.bytes, o.root);
            case Verb::all_reduce: return segment.all_reduce(call, o.x.data, o.x.items, o.how);
            case Verb::reduce: return segment.reduce(call, o.x.data, o.x.items, o.how, o.root);
            case Verb::all_gather: return segment.all_gather(call, o.x.data, o.out.targets(), Lengths(o.x.bytes));
            case Verb::gather: return segment.gather(call, o.x.data, o.out.targets(), Lengths(o.x.bytes), o.root);
            case Verb::scatter: return scatter_in_segment(o, parts, call);
            case Verb::reduce_scatter: return segment.reduce_scatter(call, o.x.sources(), o.out.data, o.out.items, o.how);
            case Verb::all_to_all:
                return segment.all_to_all(call, o.x.sources(), o.out.targets(), Lengths(o.x.bytes / ranks()));
            default: break;
        }
        throw std::logic_error("an operation of no kind");
    }

    Outcome scatter_in_segment(const Operation& o, Parts& parts, const Call& call) {
        Outcome outcome = s_.ops.tell_parts(call, o.x.sources(), shown_by(o, parts), o.root);
        if (outcome != Outcome::done) return outcome;
        const bool asked = s_.ops.told().where == Collectives::Where::shown_and_asked;
        outcome = s_.ops.take_part(call, fits(o, parts) ? o.out.data : nullptr);
        return outcome == Outcome::done && asked ? decline(call) : outcome;
    }

    Outcome scatter_by_device(const Operation& o, Parts& parts, const Call& call) {
        using Device = cuda::DeviceCollectives;
        const auto address = [](const Array& array) {
            return array.gpu >= 0 ? reinterpret_cast<cuda::Address>(array.data) : cuda::Address{0};
        };
        const auto on_host = [](const Array& array) { return array.gpu >= 0 ? nullptr : array.data; };
        const Device::Whole whole{address(o.x), on_host(o.x)};
        void* const stream = o.on_gpu ? stream_of(o) : device_->ops.gpu().stream;
        const Outcome outcome = device_->ops.tell_parts(stream, call, whole, shown_by(o, parts), o.root);
        if (outcome != Outcome::done) return outcome;
        const Device::Part part = fits(o, parts) ? Device::Part{address(o.out), on_host(o.out)} : Device::Part{};
        return device_->ops.take_part(stream, call, whole, part, o.root);
    }

    Collectives::Parts shown_by(const Operation& o, const Parts& parts) const noexcept {
        if (rank() != o.root) return {};
        return {o.out.bytes, parts.kind, {reinterpret_cast<const std::byte*>(parts.words.data()), parts.words.size()}};
    }

    // After the root has told of its parts: whether they are as this rank expects.
    bool fits(const Operation& o, Parts& parts) const {
        const Collectives::Parts& told = s_.ops.told();
        parts.fit = told.bytes == o.out.bytes && told.kind == parts.kind;
        if (!parts.fit) parts.told.assign(reinterpret_cast<const char*>(told.words.data()), told.words.size());
        return parts.fit;
    }

    // The answer of a rank that has no array on a GPU to the root's question; the others' are of no use to it.
    Outcome decline(const Call& call) {
        const std::byte no{};
        std::vector<std::byte> all(ranks());
        return s_.ops.all_gather(call, &no, all.data(), Lengths(1));
    }

    // MPI's error code, 0 if it went well.
    int by_mpi(const Operation& o) const {
        int error = 0;
        switch (o.verb) {
            case Verb::broadcast: return mpi_->broadcast(o.x.data, o.x.items, o.x.dtype, o.root);
            case Verb::all_reduce:
                error = mpi_->all_reduce(o.x.data, o.x.items, o.x.dtype, o.op);
                if (error == 0) divide_mean(o.x, o.how);
                return error;
            case Verb::reduce:
                error = mpi_->reduce(o.x.data, o.x.items, o.x.dtype, o.op, o.root, rank() == o.root);
                if (error == 0 && rank() == o.root) divide_mean(o.x, o.how);
                return error;
            case Verb::all_gather: return mpi_->all_gather(o.x.data, o.out.data, o.x.items, o.x.dtype);
            case Verb::reduce_scatter:
                error = mpi_->reduce_scatter(o.x.data, o.out.data, o.out.items, o.x.dtype, o.op);
                if (error == 0) divide_mean(o.out, o.how);
                return error;
            case Verb::all_to_all: return mpi_->all_to_all(o.x.data, o.out.data, o.x.items / ranks(), o.x.dtype);
            default: return 0;  // a barrier: the gate was one
        }
    }

    // Makes a mean of a sum.
    static void divide_mean(const Array& array, const Combine& how) noexcept {
        if (how.divisor > 1) divide(array.data, array.items, how.divisor, how.dtype);
    }

    static constexpr std::size_t worth_holding = 16 << 10;

    SharedSegment& s_;
    nb::object failed_, misfit_;
    nb::object mpi_owner_;
    MpiCalls* mpi_;
    nb::object device_owner_ = nb::none();
    DeviceGroup* device_ = nullptr;  // null: arrays on a GPU are declined
};

// An asynchronous collective: it has its number and its deadline, and runs when those that were issued before have ended.
class IssuedCollective {
public:
    IssuedCollective(FastPath& path, const Operation& operation, FastPath::Parts parts)
        : path_(path),
          owner_(nb::find(path)),
          x_(kept(operation.x.object)),
          out_(kept(operation.out.object)),
          operation_(operation),
          parts_(std::move(parts)),
          site_(CallSite::current()),
          result_(operation.result.is_valid() ? nb::borrow(operation.result) : nb::none()) {}

    // Runs it, once. False if another thread is at it. Raises only what a signal handler has raised before all ranks had met:
    // then it has not ended, and is to run again. No signal is looked at between its end and the note of it.
    bool run() {
        if (ended_ || running_) return ended_;
        running_ = true;
        Ending end;
        try {
            end = path_.perform(operation_, parts_, site_, true);
            if (end.outcome != Outcome::interrupted || end.blamed.is_valid()) path_.check(operation_, parts_, end, true);
        } catch (const nb::python_error& raised) {
            error_ = nb::borrow(raised.value());
        }
        running_ = false;
        if (end.outcome == Outcome::interrupted && !end.blamed.is_valid()) {
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(end.interrupt.ptr())), end.interrupt.ptr());
            throw nb::python_error();
        }
        ended_ = true;
        x_.reset();
        out_.reset();
        return true;
    }

    // The same; true only if it has ended without an error.
    bool run_well() { return run() && error_.is_none(); }

    std::size_t bytes() const noexcept { return operation_.bytes; }
    double remaining() const noexcept {
        return std::max(0.0, static_cast<double>(operation_.deadline_ns - monotonic_ns()) * 1e-9);
    }
    nb::object result() const { return error_.is_none() ? result_ : nb::none(); }
    nb::object error() const { return error_; }

private:
    static nb::object kept(nb::handle array) { return array.is_valid() ? nb::borrow(array) : nb::object(); }

    FastPath& path_;
    nb::object owner_;    // of the path
    nb::object x_, out_;  // whose memory it is
    Operation operation_;
    FastPath::Parts parts_;
    CallSite site_;
    nb::object result_, error_ = nb::none();
    bool running_ = false, ended_ = false;
};

nb::object FastPath::issue(Operation& o) {
    if (s_.segment.aborted()) return nb::none();
    Parts parts = parts_of(o);
    give_number(o);
    o.deadline_ns = monotonic_ns() + o.timeout_ns;
    return nb::cast(new IssuedCollective(*this, o, std::move(parts)), nb::rv_policy::take_ownership);
}

}  // namespace

void phalanx::bind_fast_path(nb::module_& m) {
    nb::class_<TurnLock>(m, "TurnLock", "Whose turn it is to run a collective of a group.")
        .def(nb::init<>())
        .def("acquire", &TurnLock::acquire, nb::arg("timeout"))
        .def("release", &TurnLock::release)
        .def("is_mine", &TurnLock::is_mine);
    nb::class_<Alarm>(m, "Alarm", "Wakes a background thread for work that no other thread has done within a moment.")
        .def(nb::init<double>(), nb::arg("longest_nap") = 0.001)
        .def("arm", &Alarm::arm)
        .def("disarm", &Alarm::disarm)
        .def("hurry", &Alarm::hurry)
        .def("stop", &Alarm::stop)
        .def("wait", &Alarm::wait);
    nb::class_<WorkQueue>(m, "WorkQueue", "The asynchronous collectives of a group that have not ended; see phalanx.group.worker.")
        .def(nb::init<>())
        .def_prop_ro("alarm", [](WorkQueue& queue) -> Alarm& { return queue.alarm; }, nb::rv_policy::reference_internal)
        .def("__len__", &WorkQueue::size)
        .def("hold_back", &WorkQueue::hold_back, nb::arg("path"))
        .def("push", &WorkQueue::push, nb::arg("work"), nb::arg("urgent"))
        .def("first", &WorkQueue::first)
        .def("pop", &WorkQueue::pop, nb::arg("work"))
        .def("end_if_empty", &WorkQueue::end_if_empty);
    nb::class_<MpiCalls>(m, "MpiCalls", "MPI's collectives on one communicator, by the addresses of its functions.")
        .def(nb::init<const std::vector<MpiCalls::Word>&, std::intptr_t, MpiCalls::Word, const std::vector<MpiCalls::Word>&,
                      const std::vector<std::vector<MpiCalls::Word>>&>())
        .def_prop_ro("inside", &MpiCalls::inside)
        .def_prop_ro("longest", &MpiCalls::longest);
    nb::class_<IssuedCollective>(m, "IssuedCollective", "An asynchronous collective; see phalanx.group.worker.")
        .def_prop_ro("bytes", &IssuedCollective::bytes)
        .def_prop_ro("remaining", &IssuedCollective::remaining)
        .def_prop_ro("result", &IssuedCollective::result)
        .def_prop_ro("error", &IssuedCollective::error)
        .def("run", &IssuedCollective::run)
        .def("run_well", &IssuedCollective::run_well)
        .def("run_to_end", &IssuedCollective::run);  // any thread can
    nb::class_<FastPath> path(m, "FastPath", "The fast path of a group's collectives; see phalanx.group.collective_runner.");
    path.def(nb::init<SharedSegment&, Recorder&, TurnLock&, PlainArrays&, nb::object, nb::object, nb::object, nb::object, double,
                      nb::object>(),
             nb::arg("segment"), nb::arg("recorder"), nb::arg("turn"), nb::arg("arrays"), nb::arg("kind_of"), nb::arg("failed"),
             nb::arg("describe"), nb::arg("misfit"), nb::arg("timeout"), nb::arg("mpi") = nb::none(), nb::keep_alive<1, 2>(),
             nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>());
    path.def_prop_rw("device", &FastPath::device, [](FastPath& self, nb::object device) { self.use_device(std::move(device)); },
                     nb::for_setter(nb::arg("device").none()));
    const auto timeout = nb::arg("timeout").none() = nb::none();
    path.def("broadcast_object", &FastPath::broadcast_object, nb::arg("src").none(), nb::arg("mine").none(), timeout)
        .def("all_gather_object", &FastPath::all_gather_object, nb::arg("mine"), timeout)
        .def("gather_object", &FastPath::gather_object, nb::arg("dst").none(), nb::arg("mine"), timeout)
        .def("scatter_object", &FastPath::scatter_object, nb::arg("src").none(), nb::arg("each").none(), timeout);
    bind_verbs(path);
}
