// The calls of a process group of torch that are as simple as most are: nothing watches torch, the tensors are plain, and
// nothing else is under way. They go from torch's function to the group's fast path in one step. Everything else is
// declined with None, before anything has happened, and phalanx/torch_backend does it.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "call_site.hpp"
#include "collective_calls.hpp"
#include "flat_tensor.hpp"
#include "frames.hpp"
#include "gil.hpp"
#include "module.hpp"
#include "phalanx/waiting.hpp"
#include "tensor_list.hpp"
#include "torch_options.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

nb::object vectorcall(nb::handle callable, std::initializer_list<PyObject*> arguments) {
    const nb::object result = in_interpreter(
        [&] { return nb::steal(PyObject_Vectorcall(callable.ptr(), arguments.begin(), arguments.size(), nullptr)); });
    if (!result.is_valid()) throw nb::python_error();
    return result;
}

// What is the same for all groups of a process.
class TorchAccess {
public:
    // `watchers` are functions that say 0, False or None where nothing watches. `finished()` makes the handle of an operation
    // that is done, which then is told its tensors. `waiting`: the codes of those functions of torch that wait for what they
    // have begun and give its handle to nobody, and of those by which they begin it.
    TorchAccess(const TensorReader& reader, const OptionsReader& options, std::vector<nb::object> watchers, nb::object finished,
                std::vector<nb::object> waiting)
        : reader(reader),
          options(options),
          watchers_(std::move(watchers)),
          finished_(std::move(finished)),
          waiting_(std::move(waiting)),
          unnamed_(this->finished(nb::list())) {}

    bool is_watched() const {
        for (const nb::object& watcher : watchers_) {
            const nb::object answer = vectorcall(watcher, {});
            if (answer.ptr() == Py_False || answer.is_none()) continue;
            if (!PyLong_CheckExact(answer.ptr()) || PyLong_AsLong(answer.ptr()) != 0) return true;
        }
        return false;
    }

    nb::object finished(nb::handle tensors) const {
        nb::object work = vectorcall(finished_, {});
        nb::setattr(work, tensors_, tensors);
        return work;
    }

    // A handle for a function that only waits for it: to make one costs more than a short collective does.
    const nb::object& unnamed() const noexcept { return unnamed_; }

    // Whether this thread runs a method of the group for a function of torch that waits. `between`: the functions between them,
    // which are torch's, too: one that a program has put there may keep the handle.
    bool is_waited_for(int between) const {
        nb::object frame = frames::current();
        for (int i = 0; i <= between; ++i) {
            frame = frames::back(frame);
            if (!frame.is_valid() || !is_waiting(frames::code(frame))) return false;
        }
        return true;
    }

    const TensorReader& reader;
    const OptionsReader& options;
    OptionsKind all_reduce, broadcast, reduce, all_gather, reduce_scatter, all_to_all, gather, scatter, barrier;

private:
    bool is_waiting(const nb::object& code) const noexcept {
        for (const nb::object& one : waiting_)
            if (one.ptr() == code.ptr()) return true;
        return false;
    }

    std::vector<nb::object> watchers_;
    nb::object finished_;
    std::vector<nb::object> waiting_;
    nb::object tensors_ = nb::steal(PyUnicode_InternFromString("_tensors"));
    nb::object unnamed_;
};

// The list that an argument of a collective is; null if it is something else.
TensorList* list_in(nb::handle argument) {
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

// A collective that is ready to run: the name of the Group's method, and its arguments, among which may be a TensorList.
class PreparedCall {
public:
    PreparedCall(nb::object group, nb::object verb, std::array<nb::object, 3> arguments, nb::object tensors, std::size_t size)
        : group_(std::move(group)), verb_(std::move(verb)), arguments_(std::move(arguments)), tensors(std::move(tensors)), size(size) {}

    // None: declined, nothing has happened.
    nb::object on_fast_path() const {
        if (!asked_.has_value()) return fast(verb_, arguments_);
        if (fast(names().all_reduce, {asked_->array, names().max, {}}).is_none()) return nb::none();
        finish(nb::none());
        return nb::borrow(Py_True);
    }

    // Runs it, in whatever thread, for the place that has asked for it. If it has waited for its turn for longer than
    // `patience`, that counts: it may take what is left of `limit`, else as long as the group's own timeout says. All seconds.
    void run(double patience, double limit) const {
        const CallSite::Lent lent(site_);
        const double waited = static_cast<double>(monotonic_ns() - issued_ns_) * 1e-9;
        if (waited <= patience && !on_fast_path().is_none()) return;
        nb::object seconds = nb::none();
        if (waited > patience) seconds = nb::float_(std::max(limit - waited, 0.0));
        if (asked_.has_value()) {
            general(names().all_reduce, {asked_->array, names().max, {}}, seconds);
            finish(seconds);
        } else {
            general(verb_, arguments_, seconds);
        }
    }

    // For one that does not run at once: the place that asks for it, and the time.
    void note_caller() {
        site_ = CallSite::current();
        issued_ns_ = monotonic_ns();
    }

    // It is an all_to_all of lists, which begins with this question.
    void ask_first(SizesAsked asked) { asked_.emplace(std::move(asked)); }
    bool asks() const noexcept { return asked_.has_value(); }

private:
    using Arguments = std::array<nb::object, 3>;  // as many as are valid

    struct Names {
        nb::object fast_path = nb::steal(PyUnicode_InternFromString("_fast_path"));
        nb::object all_reduce = nb::steal(PyUnicode_InternFromString("all_reduce"));
        nb::object max = nb::steal(PyUnicode_InternFromString("max"));
        nb::object timeout = nb::make_tuple("timeout");
    };
    static const Names& names() {
        static const auto* const kept = new Names;  // outlives the interpreter
        return *kept;
    }

    // None: declined, nothing has happened.
    nb::object fast(const nb::object& verb, const Arguments& arguments) const {
        const nb::object fast_path = nb::getattr(group_, names().fast_path);
        if (fast_path.is_none()) return nb::none();
        std::array<PyObject*, 4> all{fast_path.ptr()};
        std::size_t count = 1;
        for (const nb::object& argument : arguments)
            if (argument.is_valid()) all[count++] = argument.ptr();
        nb::object result =
            in_interpreter([&] { return nb::steal(PyObject_VectorcallMethod(verb.ptr(), all.data(), count, nullptr)); });
        if (!result.is_valid()) throw nb::python_error();
        return result;
    }

    // By the Group's method, which takes one array in the place of a list. `seconds`: None for the group's own timeout.
    void general(const nb::object& verb, Arguments arguments, const nb::object& seconds) const {
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
            return nb::steal(PyObject_VectorcallMethod(verb.ptr(), all.data(), count, names().timeout.ptr()));
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
            return nb::getattr(group_, verb_)(source, target, nb::arg("send_counts") = sent.counts,
                                              nb::arg("recv_counts") = received.counts, nb::arg("timeout") = seconds);
        });
        received.fill(*nb::inst_ptr<FlatTensor>(target));
    }

    nb::object group_, verb_;
    Arguments arguments_;
    std::optional<SizesAsked> asked_;
    CallSite site_;
    std::int64_t issued_ns_ = 0;

public:
    nb::object tensors;  // those that the operation changes
    std::size_t size;    // in bytes
};

// A message between two ranks that is ready to be moved.
class PreparedMessage {
public:
    PreparedMessage(const nb::object& group, FlatTensor& memory, nb::handle peer, nb::handle tag, bool sends)
        : group_(group), memory(nb::cast(std::move(memory))), peer(nb::borrow(peer)), tag(nb::borrow(tag)), sends(sends) {}

    // For one that does not move at once: the place that asks for it.
    void note_caller() { site_ = CallSite::current(); }
    const CallSite& site() const noexcept { return site_; }

    // Moves one that was kept, in whatever thread, for the place that has asked for it.
    nb::object move_later(nb::handle timeout) const {
        const CallSite::Lent lent(site_);
        return move(timeout);
    }

    // As FastMessages say it: False if nothing has happened.
    nb::object move(nb::handle timeout) const {
        const nb::object messages = nb::getattr(group_, names().fast_messages);
        if (messages.is_none()) return nb::bool_(false);
        PyObject* const arguments[] = {messages.ptr(), memory.ptr(), peer.ptr(), tag.ptr(), timeout.ptr()};
        const nb::object& verb = sends ? names().send : names().recv;
        nb::object answer =
            in_interpreter([&] { return nb::steal(PyObject_VectorcallMethod(verb.ptr(), arguments, 5, nullptr)); });
        if (!answer.is_valid()) {
            nb::python_error raised;
            in_interpreter([&] { return group_.attr("_take_back")(); });
            throw raised;
        }
        return answer;
    }

private:
    struct Names {
        nb::object fast_messages = nb::steal(PyUnicode_InternFromString("_fast_messages"));
        nb::object send = nb::steal(PyUnicode_InternFromString("send"));
        nb::object recv = nb::steal(PyUnicode_InternFromString("recv"));
    };
    static const Names& names() {
        static const auto* const kept = new Names;  // outlives the interpreter
        return *kept;
    }

    nb::object group_;
    CallSite site_;

public:
    nb::object memory;  // of the tensor
    nb::object peer, tag;
    bool sends;
};

class TorchCalls {
public:
    // `group` does the work. `lines` are pairs of a line and the lock of its turn: of the collectives, of messages to others,
    // and of messages from others.
    // `buffered`: bytes up to which a message is sent even if no receiver waits for it.
    // `slice_bytes`: of each tensor of a list, up to which the general way does a collective on it in one piece, whatever the
    // group's fast path is.
    TorchCalls(const TorchAccess& torch, nb::object group, nb::list lines, std::size_t buffered, std::size_t slice_bytes)
        : torch_(torch), group_(std::move(group)), buffered_(buffered), slice_(slice_bytes) {
        for (nb::handle pair : lines) lines_.emplace_back(nb::object(pair[0]), nb::object(pair[1]));
        world_size_ = nb::cast<int>(group_.attr("world_size"));
        rank_ = nb::cast<int>(group_.attr("rank"));
    }

    bool closed = false;     // everything is declined
    bool takes_gpu = false;  // tensors on a GPU are not

    nb::object all_reduce(nb::handle tensors, nb::handle options) {
        CallOptions asked;
        FlatTensor flat;
        if (!reads(torch_.all_reduce, options, asked) || !look_one(tensors, flat) || !is_reducible(flat, asked)) return nb::none();
        const std::size_t size = flat.bytes();
        const bool on_gpu = flat.gpu >= 0;
        return run(asked, {group_, verbs_.all_reduce, {made(flat), asked.op, {}}, nb::borrow(tensors), size}, on_gpu);
    }

    nb::object broadcast(nb::handle tensors, nb::handle options) {
        CallOptions asked;
        FlatTensor flat;
        if (!reads(torch_.broadcast, options, asked) || !look_one(tensors, flat)) return nb::none();
        const std::size_t size = flat.bytes();
        const bool on_gpu = flat.gpu >= 0;
        return run(asked, {group_, verbs_.broadcast, {made(flat), asked.root, {}}, nb::borrow(tensors), size}, on_gpu);
    }

    nb::object reduce(nb::handle tensors, nb::handle options) {
        CallOptions asked;
        FlatTensor flat;
        if (!reads(torch_.reduce, options, asked) || !look_one(tensors, flat) || !is_reducible(flat, asked)) return nb::none();
        const std::size_t size = flat.bytes();
        const bool on_gpu = flat.gpu >= 0;
        return run(asked, {group_, verbs_.reduce, {made(flat), asked.root, asked.op}, nb::borrow(tensors), size}, on_gpu);
    }

    nb::object all_gather(nb::handle output, nb::handle input, nb::handle options) {
        CallOptions asked;
        FlatTensor whole, part;
        if (!reads(torch_.all_gather, options, asked) || !look_both(output, whole, input, part)) return nb::none();
        if (whole.count != part.count * world_size_) return nb::none();
        const std::size_t size = whole.bytes();
        const bool on_gpu = whole.gpu >= 0;
        return run(asked, {group_, verbs_.all_gather, {made(part), made(whole), {}}, listed(output), size}, on_gpu);
    }

    nb::object reduce_scatter(nb::handle output, nb::handle input, nb::handle options) {
        CallOptions asked;
        FlatTensor whole, part;
        if (!reads(torch_.reduce_scatter, options, asked) || !look_both(output, part, input, whole)) return nb::none();
        if (whole.count != part.count * world_size_ || !is_reducible(whole, asked)) return nb::none();
        const std::size_t size = whole.bytes();
        const bool on_gpu = whole.gpu >= 0;
        return run(asked, {group_, verbs_.reduce_scatter, {made(whole), asked.op, made(part)}, listed(output), size}, on_gpu);
    }

    // Only of parts of one size.
    nb::object all_to_all(nb::handle output, nb::handle input, nb::handle output_sizes, nb::handle input_sizes, nb::handle options) {
        CallOptions asked;
        FlatTensor target, source;
        if (!is_empty(output_sizes) || !is_empty(input_sizes) || !reads(torch_.all_to_all, options, asked)) return nb::none();
        if (!look_both(output, target, input, source) || target.count != source.count || !divides(target) || !divides(source))
            return nb::none();
        const std::size_t size = source.bytes();
        const bool on_gpu = source.gpu >= 0;
        return run(asked, {group_, verbs_.all_to_all, {made(source), made(target), {}}, listed(output), size}, on_gpu);
    }

    // On lists of tensors, one for each rank.

    nb::object all_gather_list(nb::handle outputs, nb::handle inputs, nb::handle options) {
        CallOptions asked;
        FlatTensor part;
        TensorList whole;
        if (!reads(torch_.all_gather, options, asked) || !look_one(inputs, part) || !look_list(only(outputs), part, whole))
            return nb::none();
        const nb::object tensors = whole.tensors;
        const std::size_t size = whole.bytes();
        return run(asked, {group_, verbs_.all_gather, {made(part), made(whole, true), {}}, tensors, size});
    }

    nb::object reduce_scatter_list(nb::handle outputs, nb::handle inputs, nb::handle options) {
        CallOptions asked;
        FlatTensor part;
        TensorList whole;
        if (!reads(torch_.reduce_scatter, options, asked) || !look_one(outputs, part) || !is_reducible(part, asked) ||
            !look_list(only(inputs), part, whole))
            return nb::none();
        const std::size_t size = whole.bytes();
        return run(asked, {group_, verbs_.reduce_scatter, {made(whole, false), asked.op, made(part)}, nb::borrow(outputs), size});
    }

    nb::object gather_list(nb::handle outputs, nb::handle inputs, nb::handle options) {
        CallOptions asked;
        FlatTensor part;
        if (!reads(torch_.gather, options, asked) || !look_one(inputs, part) || part.gpu >= 0) return nb::none();
        nb::object whole = nb::none(), tensors = nb::list();
        if (is_root(asked)) {
            TensorList list;
            if (!look_list(only(outputs), part, list)) return nb::none();
            tensors = list.tensors;
            whole = made(list, true);
        } else if (!is_empty(outputs)) {
            return nb::none();
        }
        const std::size_t size = part.bytes() * world_size_;
        return run(asked, {group_, verbs_.gather, {made(part), asked.root, whole}, tensors, size});
    }

    nb::object scatter_list(nb::handle outputs, nb::handle inputs, nb::handle options) {
        CallOptions asked;
        FlatTensor part;
        if (!reads(torch_.scatter, options, asked) || !look_one(outputs, part) || part.gpu >= 0) return nb::none();
        nb::object whole = nb::none();
        if (is_root(asked)) {
            TensorList list;
            if (!look_list(only(inputs), part, list)) return nb::none();
            whole = made(list, false);
        } else if (!is_empty(inputs)) {
            return nb::none();
        }
        const std::size_t size = part.bytes() * world_size_;
        return run(asked, {group_, verbs_.scatter, {whole, asked.root, made(part)}, nb::borrow(outputs), size});
    }

    // The tensors may be of any size.
    nb::object all_to_all_list(nb::handle outputs, nb::handle inputs, nb::handle options) {
        CallOptions asked;
        TensorList sent, received;
        if (!reads(torch_.all_to_all, options, asked) || !sent.look(torch_.reader, inputs) ||
            !received.look(torch_.reader, outputs) || sent.dtype != received.dtype || sent.size() != world_size_ ||
            received.size() != world_size_ || !is_one_piece(sent.bytes_of(0)))
            return nb::none();
        received.is_target = true;
        const nb::object tensors = received.tensors;
        const std::size_t size = sent.bytes();
        SizesAsked sizes(std::move(sent), std::move(received));
        PreparedCall call{group_, verbs_.all_to_all, {whole_or_list(sizes.sent), whole_or_list(sizes.received), {}}, tensors, size};
        call.ask_first(std::move(sizes));
        return run(asked, std::move(call));
    }

    nb::object barrier(nb::handle options) {
        CallOptions asked;
        if (!reads(torch_.barrier, options, asked)) return nb::none();
        return run(asked, {group_, verbs_.barrier, {}, nb::list(), 0});
    }

    // The handle of a short message that is sent; or of one that goes on, the message and what FastMessages says. A long one
    // waits for its receiver, which the call must not, unless its caller does nothing else: it is prepared.
    nb::object send(nb::handle tensors, nb::handle dst, nb::handle tag) {
        FlatTensor flat;
        if (!is_open() || !is_peer(dst) || !is_tag(tag) || !look_one(tensors, flat) || flat.gpu >= 0) return nb::none();
        const bool is_idle = lines_[1].idle(), is_waited_for = is_idle && torch_.is_waited_for(1);
        const bool is_short = flat.bytes() <= buffered_;
        PreparedMessage message(group_, flat, dst, tag, true);
        if (!is_short && !(is_waited_for && lines_[2].idle())) return kept(std::move(message));
        if (!is_idle) return nb::none();
        const nb::object answer = message.move(nb::none());
        if (answer.ptr() == Py_True) return is_waited_for ? torch_.unnamed() : torch_.finished(tensors);
        if (answer.ptr() == Py_False) return is_short ? nb::none() : kept(std::move(message));
        return nb::make_tuple(kept(std::move(message)), answer);
    }

    // The same. Prepared, unless the caller waits for the message and does nothing else.
    nb::object recv(nb::handle tensors, nb::handle src, nb::handle tag) {
        FlatTensor flat;
        if (!is_open() || !is_peer(src) || !is_tag(tag) || !look_one(tensors, flat) || flat.gpu >= 0) return nb::none();
        PreparedMessage message(group_, flat, src, tag, false);
        if (lines_[2].idle() && lines_[1].idle() && torch_.is_waited_for(1)) {
            const nb::object answer = message.move(nb::none());
            if (answer.ptr() == Py_True) return torch_.unnamed();
            if (answer.ptr() != Py_False) return nb::make_tuple(kept(std::move(message)), answer);
        }
        return kept(std::move(message));
    }

private:
    class Line {
    public:
        // A lock of Python.
        Line(nb::object waiting, const nb::object& turn)
            : waiting_(std::move(waiting)),
              is_locked_(nb::getattr(turn, "locked")),
              acquire_(nb::getattr(turn, "acquire")),
              release_(nb::getattr(turn, "release")) {}

        // Nothing is in line, or has just been taken from it.
        bool idle() const { return PyObject_Size(waiting_.ptr()) == 0 && vectorcall(is_locked_, {}).ptr() == Py_False; }

        bool try_enter() const { return idle() && vectorcall(acquire_, {Py_False}).ptr() == Py_True; }
        void leave() const { vectorcall(release_, {}); }

    private:
        nb::object waiting_, is_locked_, acquire_, release_;
    };
    struct Verbs {
        nb::object all_reduce = interned("all_reduce"), broadcast = interned("broadcast"), reduce = interned("reduce"),
                   all_gather = interned("all_gather"), reduce_scatter = interned("reduce_scatter"),
                   all_to_all = interned("all_to_all"), gather = interned("gather"), scatter = interned("scatter"),
                   barrier = interned("barrier");
    };
    static nb::object interned(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }

    bool is_open() const { return !closed && !torch_.is_watched(); }

    bool reads(const OptionsKind& kind, nb::handle options, CallOptions& asked) const {
        return is_open() && torch_.options.read(kind, options, asked);
    }

    bool look_one(nb::handle tensors, FlatTensor& found) const {
        return PyList_CheckExact(tensors.ptr()) && NB_LIST_GET_SIZE(tensors.ptr()) == 1 &&
               torch_.reader.look(NB_LIST_GET_ITEM(tensors.ptr(), 0), found, takes_gpu);
    }

    bool look_both(nb::handle one, FlatTensor& found, nb::handle other, FlatTensor& other_found) const {
        return torch_.reader.look(one, found, takes_gpu) && torch_.reader.look(other, other_found, takes_gpu) &&
               found.dtype == other_found.dtype && found.gpu == other_found.gpu;
    }

    // The one list of a list; invalid if there are more.
    static nb::handle only(nb::handle lists) noexcept {
        const bool is_one = PyList_CheckExact(lists.ptr()) && NB_LIST_GET_SIZE(lists.ptr()) == 1;
        return is_one ? nb::handle(NB_LIST_GET_ITEM(lists.ptr(), 0)) : nb::handle();
    }

    // One tensor for each rank, all like that one, which lies on the host.
    bool look_list(nb::handle list, const FlatTensor& like, TensorList& found) const {
        return list.is_valid() && like.gpu < 0 && found.look(torch_.reader, list) && found.size() == world_size_ &&
               found.are_alike() && found.counts[0] == like.count && found.dtype == like.dtype && is_one_piece(like.bytes());
    }

    // Whether the general way, which another rank may have to go, does a collective on tensors of this length in one piece.
    bool is_one_piece(std::size_t bytes) const {
        if (bytes <= slice_) return true;
        const nb::object path = nb::getattr(group_, fast_path_);
        const CollectiveCalls* const calls = path.is_none() ? nullptr : CollectiveCalls::of(path);
        return calls != nullptr && calls->takes_parts();
    }

    // Whether it is another rank of the group.
    bool is_peer(nb::handle rank) const noexcept {
        int overflow = 0;
        const long number = PyLong_CheckExact(rank.ptr()) ? PyLong_AsLongAndOverflow(rank.ptr(), &overflow) : -1;
        return number >= 0 && number < world_size_ && number != rank_;
    }

    static bool is_tag(nb::handle tag) noexcept {
        int overflow = 0;
        return PyLong_CheckExact(tag.ptr()) && PyLong_AsLongLongAndOverflow(tag.ptr(), &overflow) >= 0;
    }

    bool is_root(const CallOptions& asked) const noexcept {
        int overflow = 0;
        return PyLong_CheckExact(asked.root.ptr()) && PyLong_AsLongAndOverflow(asked.root.ptr(), &overflow) == rank_;
    }

    bool divides(const FlatTensor& flat) const noexcept { return flat.rows >= 0 && flat.rows % world_size_ == 0; }

    static bool is_empty(nb::handle sizes) noexcept { return PyList_CheckExact(sizes.ptr()) && NB_LIST_GET_SIZE(sizes.ptr()) == 0; }

    // Whether the group's reduction on this memory is all that there is to do. Elements that lie there as another dtype are
    // not reduced as that one, and a mean of integers is rounded as torch does it.
    bool is_reducible(const FlatTensor& flat, const CallOptions& asked) const noexcept {
        return !flat.is_stand_in && (asked.op.ptr() != mean_.ptr() || flat.is_floating);
    }

    static nb::object made(FlatTensor& flat) { return nb::cast(std::move(flat)); }

    static nb::object made(TensorList& list, bool is_target) {
        list.is_target = is_target;
        return whole_or_list(nb::cast(std::move(list)));
    }

    // Tensors that lie one after another are one array.
    static nb::object whole_or_list(const nb::object& list) {
        const TensorList& tensors = *list_in(list);
        return tensors.are_adjacent() ? nb::cast(tensors.whole()) : list;
    }

    static nb::object kept(PreparedMessage&& message) {
        message.note_caller();
        return nb::cast(std::move(message));
    }

    static nb::object listed(nb::handle tensor) {
        nb::list one;
        one.append(tensor);
        return one;
    }

    // The handle of an operation that is done, the call for later, or None.
    nb::object run(const CallOptions& asked, PreparedCall&& call, bool on_gpu = false) const {
        if (asked.later && on_gpu) return nb::none();
        if (asked.later) {
            call.note_caller();
            return nb::cast(std::move(call));
        }
        if (call.asks() ? !run_both(call) : !lines_[0].idle() || call.on_fast_path().is_none()) return nb::none();
        return torch_.is_waited_for(0) ? torch_.unnamed() : torch_.finished(call.tensors);
    }

    // Two collectives, between which no other may come. False: declined.
    bool run_both(const PreparedCall& call) const {
        if (!lines_[0].try_enter()) return false;
        bool done = false;
        try {
            done = !call.on_fast_path().is_none();
        } catch (...) {
            lines_[0].leave();
            throw;
        }
        lines_[0].leave();
        return done;
    }

    const TorchAccess& torch_;
    nb::object group_;
    const std::size_t buffered_, slice_;
    std::vector<Line> lines_;
    Verbs verbs_;
    nb::object mean_ = interned("mean"), fast_path_ = interned("_fast_path");
    int world_size_ = 0, rank_ = 0;
};

}  // namespace

void phalanx::bind_torch_calls(nb::module_& m) {
    static PyType_Slot buffer[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(FlatTensor::get_buffer)}, {0, nullptr}};
    nb::class_<FlatTensor>(m, "FlatTensor", nb::type_slots(buffer), "The memory of a tensor, as a flat array.");
    nb::class_<TensorList>(m, "TensorList", "A list of tensors, each where it lies.");
    nb::class_<TensorReader>(m, "TensorReader", "Finds the memory of torch's tensors.")
        .def(nb::init<std::vector<nb::object>, nb::object, nb::object, const nb::list&>(), nb::arg("types"),
             nb::arg("exchange_api"), nb::arg("is_neg"), nb::arg("dtypes"))
        .def(
            "look",
            [](const TensorReader& reader, nb::handle tensor) {
                FlatTensor found;
                return reader.look(tensor, found) ? nb::cast(std::move(found)) : nb::none();
            },
            nb::arg("tensor").none())
        .def("layout", &TensorReader::layout, nb::arg("tensors"), "Where tensors lie, to be compared.");
    nb::class_<OptionsKind>(m, "OptionsKind", "One of torch's classes of options.")
        .def(nb::init<nb::object, bool, bool, const std::vector<int>&>(), nb::arg("kind"), nb::arg("has_op"), nb::arg("has_root"),
             nb::arg("places"));
    nb::class_<OptionsReader>(m, "OptionsReader", "Reads the options of torch's calls.")
        .def(nb::init<nb::object, const nb::list&>(), nb::arg("unset"), nb::arg("reductions"));
    nb::class_<TorchAccess>(m, "TorchAccess", "How a group's fast calls see torch.")
        .def(nb::init<const TensorReader&, const OptionsReader&, std::vector<nb::object>, nb::object, std::vector<nb::object>>(),
             nb::arg("reader"), nb::arg("options"), nb::arg("watchers"), nb::arg("finished"), nb::arg("waiting"),
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def_rw("all_reduce", &TorchAccess::all_reduce)
        .def_rw("broadcast", &TorchAccess::broadcast)
        .def_rw("reduce", &TorchAccess::reduce)
        .def_rw("all_gather", &TorchAccess::all_gather)
        .def_rw("reduce_scatter", &TorchAccess::reduce_scatter)
        .def_rw("all_to_all", &TorchAccess::all_to_all)
        .def_rw("gather", &TorchAccess::gather)
        .def_rw("scatter", &TorchAccess::scatter)
        .def_rw("barrier", &TorchAccess::barrier);
    nb::class_<PreparedCall>(m, "PreparedCall", "A collective that is ready to run; see phalanx.torch_backend.fast_calls.")
        .def_ro("tensors", &PreparedCall::tensors)
        .def_ro("size", &PreparedCall::size)
        .def("__call__", &PreparedCall::run, nb::arg("patience"), nb::arg("limit"));
    nb::class_<PreparedMessage>(m, "PreparedMessage", "A message between two ranks that is ready to be moved.")
        .def_ro("memory", &PreparedMessage::memory)
        .def_ro("peer", &PreparedMessage::peer)
        .def_ro("tag", &PreparedMessage::tag)
        .def_ro("sends", &PreparedMessage::sends)
        .def_prop_ro("site", &PreparedMessage::site, nb::rv_policy::reference_internal)
        .def("__call__", &PreparedMessage::move_later, nb::arg("timeout").none());
    nb::class_<TorchCalls>(m, "TorchCalls", "The simple calls of a process group of torch; see phalanx.torch_backend.fast_calls.")
        .def(nb::init<const TorchAccess&, nb::object, nb::list, std::size_t, std::size_t>(), nb::arg("torch"), nb::arg("group"),
             nb::arg("lines"), nb::arg("buffered"), nb::arg("slice_bytes"), nb::keep_alive<1, 2>())
        .def_rw("closed", &TorchCalls::closed)
        .def_rw("takes_gpu", &TorchCalls::takes_gpu)
        .def("allreduce", &TorchCalls::all_reduce, nb::arg().none(), nb::arg().none())
        .def("broadcast", &TorchCalls::broadcast, nb::arg().none(), nb::arg().none())
        .def("reduce", &TorchCalls::reduce, nb::arg().none(), nb::arg().none())
        .def("all_gather_single", &TorchCalls::all_gather, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("reduce_scatter_single", &TorchCalls::reduce_scatter, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("all_to_all_single", &TorchCalls::all_to_all, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
             nb::arg().none())
        .def("allgather", &TorchCalls::all_gather_list, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("reduce_scatter", &TorchCalls::reduce_scatter_list, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("alltoall", &TorchCalls::all_to_all_list, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("gather", &TorchCalls::gather_list, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("scatter", &TorchCalls::scatter_list, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("barrier", &TorchCalls::barrier, nb::arg().none())
        .def("send", &TorchCalls::send, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("recv", &TorchCalls::recv, nb::arg().none(), nb::arg().none(), nb::arg().none());
}
