// What the fast calls of torch.distributed know of torch and of the lines that operations stand in: the same for all calls of a
// process group. Nothing here knows torch but by what it is given.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "flat_tensor.hpp"
#include "frames.hpp"
#include "gil.hpp"
#include "operation_line.hpp"
#include "torch_options.hpp"

namespace phalanx {

namespace nb = nanobind;

inline nb::object vectorcall(nb::handle callable, std::initializer_list<PyObject*> arguments) {
    const nb::object result = in_interpreter(
        [&] { return nb::steal(PyObject_Vectorcall(callable.ptr(), arguments.begin(), arguments.size(), nullptr)); });
    if (!result.is_valid()) throw nb::python_error();
    return result;
}

// What is the same for all groups of a process.
class TorchAccess {
public:
    // `watchers` are functions that say 0, False or None where nothing watches. `addresses` are those of torch's own functions that
    // say the same, or none (phalanx.torch_backend.watchers). `handles` are the classes of handles, of operations that are done, of
    // collectives and of messages, and `begin_handle` is their constructor. `translated(error)` is an error as torch has it,
    // `count_change(tensors)` tells autograd that they are written. `waiting`: the codes of those functions of torch that wait for
    // what they have begun and give its handle to nobody, and of those by which they begin it.
    TorchAccess(const TensorReader& reader, const OptionsReader& options, std::vector<nb::object> watchers,
                const std::vector<std::uintptr_t>& addresses, const std::vector<nb::object>& handles, nb::object begin_handle,
                nb::object translated, nb::object count_change, std::vector<nb::object> waiting)
        : reader(reader),
          options(options),
          watchers_(std::move(watchers)),
          done_(handles.at(0), "_tensors"),
          collective_(handles.at(1), "_call"),
          message_(handles.at(2), "_call"),
          begin_handle_(std::move(begin_handle)),
          translated_(std::move(translated)),
          count_change_(std::move(count_change)),
          waiting_(std::move(waiting)),
          unnamed_(this->finished(nb::list())) {
        if (addresses.size() != 3) return;
        modes_ = reinterpret_cast<Modes>(addresses[0]);
        profiler_ = reinterpret_cast<Profiler>(addresses[1]);
        transforms_ = reinterpret_cast<Transforms>(addresses[2]);
    }

    bool is_watched() const {
        if (modes_ != nullptr) {
            if (modes_() != 0 || profiler_()) return true;
            const void* const* const ends = transforms_();  // a vector: its first element, and the one after its last
            return ends[0] != ends[1];
        }
        for (const nb::object& watcher : watchers_) {
            const nb::object answer = vectorcall(watcher, {});
            if (answer.ptr() == Py_False || answer.is_none()) continue;
            if (!PyLong_CheckExact(answer.ptr()) || PyLong_AsLong(answer.ptr()) != 0) return true;
        }
        return false;
    }

    // The handle of an operation that is done.
    nb::object finished(nb::handle tensors) const { return made(done_, tensors); }

    // The handles of a PreparedCall and of a PreparedMessage.
    nb::object of_collective(nb::handle call) const { return made(collective_, call); }
    nb::object of_message(nb::handle message) const { return made(message_, message); }

    void count_change(nb::handle tensors) const { vectorcall(count_change_, {tensors.ptr()}); }

    // An error as torch has it.
    nb::object translated(const nb::python_error& raised) const {
        if (raised.traceback().is_valid()) PyException_SetTraceback(raised.value().ptr(), raised.traceback().ptr());
        return vectorcall(translated_, {raised.value().ptr()});
    }

    // A handle for a function that only waits for it: to make one costs more than a short collective does.
    const nb::object& unnamed() const noexcept { return unnamed_; }

    // Whether the method of the group was called by a function of torch that waits. `between`: the functions between them,
    // which are torch's, too: one that a program has put there may keep the handle.
    bool is_waited_for(int between) const {
        nb::object frame = frames::current();
        for (int i = 0;; ++i) {
            if (!frame.is_valid() || !is_waiting(frames::code(frame))) return false;
            if (i == between) return true;
            frame = frames::back(frame);
        }
    }

    const TensorReader& reader;
    const OptionsReader& options;
    OptionsKind all_reduce, broadcast, reduce, all_gather, reduce_scatter, all_to_all, gather, scatter, barrier;

private:
    // A class of handles, and the field of it that is set at once. They are made without its constructor: one in Python takes as
    // long as the rest.
    struct Handles {
        Handles(nb::object kind, const char* name)
            : type(std::move(kind)),
              field(type.attr(name)),
              make(reinterpret_cast<newfunc>(PyType_GetSlot(reinterpret_cast<PyTypeObject*>(type.ptr()), Py_tp_new))),
              set_field(reinterpret_cast<descrsetfunc>(PyType_GetSlot(Py_TYPE(field.ptr()), Py_tp_descr_set))) {}

        nb::object type, field;
        newfunc make;
        descrsetfunc set_field;
    };

    nb::object made(const Handles& kind, nb::handle value) const {
        nb::object work = nb::steal(kind.make(reinterpret_cast<PyTypeObject*>(kind.type.ptr()), nothing_.ptr(), nullptr));
        if (!work.is_valid()) throw nb::python_error();
        vectorcall(begin_handle_, {work.ptr()});
        if (kind.set_field(kind.field.ptr(), work.ptr(), value.ptr()) != 0) throw nb::python_error();
        return work;
    }

    bool is_waiting(const nb::object& code) const noexcept {
        for (const nb::object& one : waiting_)
            if (one.ptr() == code.ptr()) return true;
        return false;
    }

    using Modes = std::int64_t (*)();
    using Profiler = bool (*)();
    using Transforms = const void* const* (*)();

    std::vector<nb::object> watchers_;
    Modes modes_ = nullptr;
    Profiler profiler_ = nullptr;
    Transforms transforms_ = nullptr;
    Handles done_, collective_, message_;
    nb::object begin_handle_, translated_, count_change_;
    std::vector<nb::object> waiting_;
    nb::object nothing_ = nb::steal(PyTuple_New(0));
    nb::object unnamed_;
};

// A line of operations, which a Runner of phalanx.torch_backend serves.
class TorchLine {
public:
    TorchLine(nb::object torch, nb::object line)
        : torch(*nb::inst_ptr<TorchAccess>(torch)), runner(std::move(line)), torch_object_(std::move(torch)) {
        const nb::object state = runner.attr("state");
        queue_object_ = state[0];
        turn_object_ = state[1];
        queue_ = nb::cast<OperationQueue*>(queue_object_);
        turn_ = nb::cast<LineTurn*>(turn_object_);
    }

    bool is_empty() const noexcept { return queue_->size() == 0; }

    // Nothing is in line, or has just been taken from it.
    bool idle() const noexcept { return is_empty() && !turn_->is_held(); }

    bool try_enter() const noexcept { return is_empty() && turn_->try_acquire(); }
    void leave() const noexcept { turn_->release(); }

    // Takes an operation out of the line, and the turn for it, if it is the next one and nothing runs.
    bool try_enter_for(nb::handle operation) const {
        if (!queue_->is_next(operation) || !turn_->try_acquire()) return false;
        queue_->take_first();
        return true;
    }

    // Puts an operation at the end of the line. `at_once`: whether it is worth waking the line's thread for.
    void join(nb::handle operation, bool at_once) const {
        queue_->append(nb::borrow(operation));
        if (at_once || !queue_->is_served()) in_interpreter([&] { return runner.attr("attend")(at_once); });
    }

    // Makes an operation the next one again, which was interrupted before it had begun. In its turn.
    void put_back(nb::handle operation) const {
        if (!queue_->is_next(operation)) queue_->put_first(nb::borrow(operation));
        try {
            in_interpreter([&] { return runner.attr("attend")(true); });
        } catch (const nb::python_error&) {  // the next signal: whoever waits for the operation runs it, too
        }
    }

    // Seconds that an operation may take.
    double limit() const { return nb::cast<double>(nb::getattr(runner, "default")); }

    const TorchAccess& torch;
    const nb::object runner;

private:
    nb::object torch_object_, queue_object_, turn_object_;
    OperationQueue* queue_ = nullptr;
    LineTurn* turn_ = nullptr;
};

}  // namespace phalanx
