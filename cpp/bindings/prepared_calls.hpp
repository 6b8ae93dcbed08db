// Calls of torch.distributed that are ready to run, and what is known of them while they stand in line: whether they have ended,
// and how. Their handles (phalanx.torch_backend) ask for it here, so that a handle that is only waited for needs nothing else.
#pragma once

#include <nanobind/nanobind.h>

#include <time.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "call_site.hpp"
#include "collective_calls.hpp"
#include "phalanx/waiting.hpp"
#include "tensor_list.hpp"
#include "torch_access.hpp"

namespace phalanx {

// The list that an argument of a collective is; null if it is something else.
inline TensorList* list_in(nb::handle argument) {
    static const nb::handle type = nb::type<TensorList>();
    const bool is_list = reinterpret_cast<PyObject*>(Py_TYPE(argument.ptr())) == type.ptr();
    return is_list ? nb::inst_ptr<TensorList>(argument) : nullptr;
}

// The sizes of the tensors of an all_to_all on lists. A rank whose tensors are of one size may have peers that have others. To ask
// all of them takes less than to exchange all the sizes.
class SizesAsked {
public:
    SizesAsked(TensorList&& sending, TensorList&& receiving)
        : sent(nb::cast(std::move(sending))), received(nb::cast(std::move(receiving))) {
        std::int64_t most = 0, least = INT64_MAX;
        for (const auto* counts : {&list_in(sent)->counts, &list_in(received)->counts})
            for (const Py_ssize_t count : *counts) {
                most = std::max<std::int64_t>(most, count);
                least = std::min<std::int64_t>(least, count);
            }
        const std::int64_t extremes[] = {most, -least};
        FlatTensor flat;
        flat.tensor = nb::steal(PyByteArray_FromStringAndSize(reinterpret_cast<const char*>(extremes), sizeof extremes));
        if (!flat.tensor.is_valid()) throw nb::python_error();
        flat.data = reinterpret_cast<std::byte*>(PyByteArray_AsString(flat.tensor.ptr()));
        flat.count = 2;
        flat.itemsize = sizeof extremes[0];
        flat.number = int64;
        extremes_ = flat.data;
        array = nb::cast(std::move(flat));
    }

    nb::object sent, received;  // the lists
    nb::object array;           // to be reduced to its maximum

    // Afterwards: whether all tensors of all ranks are of one size.
    bool are_alike() const noexcept {
        std::int64_t extremes[2];
        std::memcpy(extremes, extremes_, sizeof extremes);
        return extremes[0] == -extremes[1];
    }

private:
    static constexpr int int64 = 7;  // in `phalanx._native.PLAIN`

    const std::byte* extremes_;
};

// An operation that stands in line, as its handle knows it. The handle has a part in Python (a lock, a future, what waits for the
// end in another thread), which it makes when somebody asks for one of these: it is open then, and hears of the end.
class OperationInLine {
public:
    bool ended() const noexcept { return ended_; }
    nb::object error() const { return error_.is_valid() ? error_ : nb::none(); }
    bool is_open() const noexcept { return is_open_; }
    nb::object runner() const { return line_->runner; }

    // From now on the handle hears of the end. True if that was before.
    bool open() noexcept {
        is_open_ = true;
        return ended_;
    }

    // `error`: None if all went well.
    void note_end(nb::handle error) {
        if (!error.is_none()) error_ = nb::borrow(error);
        ended_ = true;
    }

protected:
    void stand_in(const std::shared_ptr<TorchLine>& line) {
        line_ = line;
        site_ = CallSite::current();
    }

    // Does the operation, and notes its end; what `act` raises is its error. `act` returns false if the operation goes on.
    template <class Act>
    void run_and_end(nb::handle handle, Act act) {
        nb::object error = nb::none();
        try {
            if (!act()) return;
        } catch (const nb::python_error& raised) {
            error = line_->torch.translated(raised);
        } catch (const std::exception& raised) {
            error = vectorcall(PyExc_RuntimeError, {nb::str(raised.what()).ptr()});
        }
        if (!is_open_) return note_end(error);  // nothing between lets another thread open it
        PyObject* const both[] = {handle.ptr(), error.ptr()};
        const nb::object heard =
            in_interpreter([&] { return nb::steal(PyObject_VectorcallMethod(names().end.ptr(), both, 2, nullptr)); });
        if (!heard.is_valid()) throw nb::python_error();
    }

    // Runs the operation in this thread if it is the next one in its line and nothing runs. True if it has ended well; if not,
    // the handle does the rest.
    template <class Run>
    bool wait_for(nb::handle handle, Run run) {
        if (!ended_ && line_->try_enter_for(handle)) {
            try {
                run();
            } catch (...) {
                line_->leave();
                throw;
            }
            line_->leave();
            if (is_open_) in_interpreter([&] { return handle.attr("call_back")(); });
        }
        return ended_ && !error_.is_valid();
    }

    std::shared_ptr<TorchLine> line_;
    CallSite site_;  // the place that has asked for it

private:
    struct Names {
        nb::object end = nb::steal(PyUnicode_InternFromString("_end"));
    };
    static const Names& names() {
        static const auto* const kept = new Names;  // outlives the interpreter
        return *kept;
    }

    nb::object error_;
    bool ended_ = false, is_open_ = false;
};

// A collective that is ready to run: the Group's verb, and its arguments, among which may be a TensorList.
class PreparedCall : public OperationInLine {
public:
    // `is_counted`: torch's own backends write the tensors by an operation of torch, so that autograd counts the change: what it
    // has saved of them before is refused, and not used with other values in it.
    PreparedCall(nb::object group, Verb verb, std::array<nb::object, 3> arguments, nb::object tensors, std::size_t size,
                 bool is_counted = false)
        : group_(std::move(group)),
          verb_(verb),
          arguments_(std::move(arguments)),
          tensors(std::move(tensors)),
          size(size),
          is_counted(is_counted) {}

    // None: declined, nothing has happened.
    nb::object on_fast_path() const {
        if (!asked_.has_value()) return fast(verb_, arguments_);
        if (fast(Verb::all_reduce, {asked_->array, names().max, {}}).is_none()) return nb::none();
        finish(nb::none());
        return nb::borrow(Py_True);
    }

    // For one that does not run at once.
    void wait_in(const std::shared_ptr<TorchLine>& line) {
        stand_in(line);
        issued_ns_ = roughly_now_ns();
    }

    // Runs it for its handle, which keeps the error: in its turn, in whatever thread.
    void run(nb::handle handle) {
        run_and_end(handle, [&] {
            perform();
            return true;
        });
    }

    bool wait(nb::handle handle) {
        return wait_for(handle, [&] { run(handle); });
    }

    // It is an all_to_all of lists, which begins with this question.
    void ask_first(SizesAsked asked) { asked_.emplace(std::move(asked)); }
    bool asks() const noexcept { return asked_.has_value(); }

private:
    using Arguments = std::array<nb::object, 3>;  // as many as are valid

    // To some milliseconds, which costs less.
    static std::int64_t roughly_now_ns() noexcept {
        timespec now{};
        clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
        return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
    }

    static constexpr double patience = 1.0;  // seconds in line that do not count as a part of the time that it may take

    struct Names {
        Names() {
            for (int i = 0; i < phalanx::verbs; ++i) verbs[i] = nb::steal(PyUnicode_InternFromString(verb_names[i]));
        }
        const nb::object& of(Verb verb) const { return verbs[static_cast<int>(verb)]; }

        std::array<nb::object, phalanx::verbs> verbs;
        nb::object fast_path = nb::steal(PyUnicode_InternFromString("_fast_path"));
        nb::object max = nb::steal(PyUnicode_InternFromString("max"));
        nb::object timeout = nb::make_tuple("timeout");
    };
    static const Names& names() {
        static const auto* const kept = new Names;  // outlives the interpreter
        return *kept;
    }

    // For the place that has asked for it. If it has waited for its turn for long, that counts: it may take what is left of the
    // line's time, else as long as the group's own timeout says.
    void perform() const {
        const CallSite::Lent lent(site_);
        const double waited = static_cast<double>(roughly_now_ns() - issued_ns_) * 1e-9;
        if (waited <= patience && !on_fast_path().is_none()) return;
        nb::object seconds = nb::none();
        if (waited > patience) seconds = nb::float_(std::max(line_->limit() - waited, 0.0));
        if (asked_.has_value()) {
            general(Verb::all_reduce, {asked_->array, names().max, {}}, seconds);
            finish(seconds);
        } else {
            general(verb_, arguments_, seconds);
        }
    }

    // None: declined, nothing has happened.
    nb::object fast(Verb verb, const Arguments& arguments) const {
        const nb::object fast_path = nb::getattr(group_, names().fast_path);
        if (fast_path.is_none()) return nb::none();
        if (CollectiveCalls* const calls = CollectiveCalls::of(fast_path))
            return calls->call(verb, {arguments[0], arguments[1], arguments[2]}, nb::none(), false);
        std::array<PyObject*, 4> all{fast_path.ptr()};
        std::size_t count = 1;
        for (const nb::object& argument : arguments)
            if (argument.is_valid()) all[count++] = argument.ptr();
        PyObject* const name = names().of(verb).ptr();
        nb::object result = in_interpreter([&] { return nb::steal(PyObject_VectorcallMethod(name, all.data(), count, nullptr)); });
        if (!result.is_valid()) throw nb::python_error();
        return result;
    }

    // By the Group's method, which takes one array in the place of a list. `seconds`: None for the group's own timeout.
    void general(Verb verb, Arguments arguments, const nb::object& seconds) const {
        const TensorList* target = nullptr;
        nb::object filled;
        for (nb::object& argument : arguments) {
            const TensorList* const list = argument.is_valid() ? list_in(argument) : nullptr;
            if (list == nullptr) continue;
            nb::object joined = nb::cast(list->joined());
            if (list->is_target) {
                target = list;
                filled = joined;
            }
            argument = std::move(joined);
        }
        std::array<PyObject*, 5> all{group_.ptr()};
        std::size_t count = 1;
        for (const nb::object& argument : arguments)
            if (argument.is_valid()) all[count++] = argument.ptr();
        all[count] = seconds.ptr();
        const nb::object result = in_interpreter([&] {
            return nb::steal(PyObject_VectorcallMethod(names().of(verb).ptr(), all.data(), count, names().timeout.ptr()));
        });
        if (!result.is_valid()) throw nb::python_error();
        if (target != nullptr) target->fill(*nb::inst_ptr<FlatTensor>(filled));
    }

    // Of an all_to_all of lists: all that comes after the question.
    void finish(const nb::object& seconds) const {
        if (!asked_->are_alike()) return exchange_unlike(seconds);
        if (!seconds.is_none() || fast(verb_, arguments_).is_none()) general(verb_, arguments_, seconds);
    }

    void exchange_unlike(const nb::object& seconds) const {
        const TensorList &sent = *list_in(asked_->sent), &received = *list_in(asked_->received);
        const nb::object source = nb::cast(sent.joined()), target = nb::cast(received.joined());
        in_interpreter([&] {
            return nb::getattr(group_, names().of(verb_))(source, target, nb::arg("send_counts") = sent.counts,
                                              nb::arg("recv_counts") = received.counts, nb::arg("timeout") = seconds);
        });
        received.fill(*nb::inst_ptr<FlatTensor>(target));
    }

    nb::object group_;
    Verb verb_;
    Arguments arguments_;
    std::optional<SizesAsked> asked_;
    std::int64_t issued_ns_ = 0;

public:
    nb::object tensors;  // those that the operation changes
    std::size_t size;    // in bytes
    bool is_counted;
};

// A message between two ranks that is ready to be moved.
class PreparedMessage : public OperationInLine {
public:
    PreparedMessage(const nb::object& group, FlatTensor& memory, nb::handle peer, nb::handle tag, nb::handle tensors, bool sends)
        : group(group),
          memory(nb::cast(std::move(memory))),
          peer(nb::borrow(peer)),
          tag(nb::borrow(tag)),
          tensors(nb::borrow(tensors)),
          sends(sends) {}

    // For one that does not move at once. `other`: the line of the other direction.
    void wait_in(const std::shared_ptr<TorchLine>& line, const std::shared_ptr<TorchLine>& other) {
        stand_in(line);
        other_line_ = other;
    }
    const CallSite& site() const noexcept { return site_; }
    nb::object other_runner() const { return other_line_->runner; }

    // True once it was begun.
    bool begun() const noexcept { return begun_; }

    // Begins it for its handle: in its turn, in whatever thread. It has ended then, or the handle goes on with it. Raises only what
    // a signal handler has raised: then it stands in line again.
    void run(nb::handle handle) {
        nb::object answer = std::exchange(rest_, nb::none());
        try {
            const CallSite::Lent lent(site_);
            if (answer.is_none()) answer = try_to_move();
        } catch (const nb::python_error& raised) {
            if (is_put_back(handle, raised)) throw;
            take_back();
            run_and_end(handle, []() -> bool { throw; });
            begun_ = true;
            return;
        }
        if (answer.ptr() == Py_True)
            run_and_end(handle, [] { return true; });
        else
            go_on(handle, answer);
        begun_ = true;
    }

    // The other rank may wait for what stands in the line of the other direction: then the handle sees to that first.
    bool wait(nb::handle handle) {
        if (!ended() && (begun_ || !other_line_->is_empty())) return false;
        return wait_for(handle, [&] { run(handle); });
    }

    // In the call itself, without a handle. As FastMessages say it: False if nothing has happened.
    nb::object move() const {
        try {
            return try_to_move();
        } catch (const nb::python_error&) {
            take_back();
            throw;
        }
    }

private:
    nb::object try_to_move() const {
        const nb::object messages = nb::getattr(group, names().fast_messages);
        if (messages.is_none()) return nb::bool_(false);
        PyObject* const arguments[] = {messages.ptr(), memory.ptr(), peer.ptr(), tag.ptr(), Py_None};
        const nb::object& verb = sends ? names().send : names().recv;
        nb::object answer =
            in_interpreter([&] { return nb::steal(PyObject_VectorcallMethod(verb.ptr(), arguments, 5, nullptr)); });
        if (!answer.is_valid()) throw nb::python_error();
        return answer;
    }

    void take_back() const {
        in_interpreter([&] { return group.attr("_take_back")(); });
    }

    // Has the handle go on with it. What that raises was raised by a signal handler.
    void go_on(nb::handle handle, const nb::object& answer) {
        try {
            in_interpreter([&] { return handle.attr("go_on")(answer); });
        } catch (const nb::python_error&) {
            put_back(handle, answer);
            throw;
        }
    }

    // Whether it was a signal handler that has raised this: then it stands in line again.
    bool is_put_back(nb::handle handle, const nb::python_error& raised) {
        nb::object answer = nb::bool_(false);
        try {
            answer = in_interpreter([&] { return handle.attr("after")(raised.value()); });
        } catch (const nb::python_error&) {  // the next signal
        }
        if (answer.is_none()) return false;
        put_back(handle, answer);
        return true;
    }

    void put_back(nb::handle handle, const nb::object& answer) {
        rest_ = answer;
        line_->put_back(handle);
    }

    nb::object rest_ = nb::none();  // what FastMessages have said, if an interrupt has come before the handle could go on with it

    struct Names {
        nb::object fast_messages = nb::steal(PyUnicode_InternFromString("_fast_messages"));
        nb::object send = nb::steal(PyUnicode_InternFromString("send"));
        nb::object recv = nb::steal(PyUnicode_InternFromString("recv"));
    };
    static const Names& names() {
        static const auto* const kept = new Names;  // outlives the interpreter
        return *kept;
    }

    std::shared_ptr<TorchLine> other_line_;
    bool begun_ = false;

public:
    nb::object group;   // does it
    nb::object memory;  // of the tensor
    nb::object peer, tag;
    nb::object tensors;  // a list with the tensor
    bool sends;
};

}  // namespace phalanx
