// The calls of a process group of torch that are as simple as most are: nothing watches torch, the tensors are plain, and
// nothing else is under way. They go from torch's function to the group's fast path in one step. Everything else is
// declined with None, before anything has happened, and phalanx/torch_backend does it.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>
#include <vector>

#include "prepared_calls.hpp"

namespace phalanx {

class TorchCalls {
public:
    // `group` does the work. `lines` are the Runners of the collectives, of messages to others, and of messages from others.
    // `buffered`: bytes up to which a message is sent even if no receiver waits for it.
    // `short_bytes`: up to which a collective is not worth waking the line's thread for.
    // `slice_bytes`: of each tensor of a list, up to which the general way does a collective on it in one piece, whatever the
    // group's fast path is.
    TorchCalls(const nb::object& torch, nb::object group, const nb::list& lines, std::size_t buffered, std::size_t short_bytes,
               std::size_t slice_bytes)
        : torch_(*nb::inst_ptr<TorchAccess>(torch)),
          group_(std::move(group)),
          buffered_(buffered),
          short_(short_bytes),
          slice_(slice_bytes) {
        for (nb::handle line : lines) lines_.push_back(std::make_shared<TorchLine>(torch, nb::borrow(line)));
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
        return run(asked, {group_, Verb::all_reduce, {made(flat), asked.op, {}}, nb::borrow(tensors), size}, on_gpu);
    }

    nb::object broadcast(nb::handle tensors, nb::handle options) {
        CallOptions asked;
        FlatTensor flat;
        if (!reads(torch_.broadcast, options, asked) || !look_one(tensors, flat)) return nb::none();
        const std::size_t size = flat.bytes();
        const bool on_gpu = flat.gpu >= 0;
        return run(asked, {group_, Verb::broadcast, {made(flat), asked.root, {}}, nb::borrow(tensors), size}, on_gpu);
    }

    nb::object reduce(nb::handle tensors, nb::handle options) {
        CallOptions asked;
        FlatTensor flat;
        if (!reads(torch_.reduce, options, asked) || !look_one(tensors, flat) || !is_reducible(flat, asked)) return nb::none();
        const std::size_t size = flat.bytes();
        const bool on_gpu = flat.gpu >= 0;
        return run(asked, {group_, Verb::reduce, {made(flat), asked.root, asked.op}, nb::borrow(tensors), size}, on_gpu);
    }

    nb::object all_gather(nb::handle output, nb::handle input, nb::handle options) {
        CallOptions asked;
        FlatTensor whole, part;
        if (!reads(torch_.all_gather, options, asked) || !look_both(output, whole, input, part)) return nb::none();
        if (whole.count != part.count * world_size_) return nb::none();
        const std::size_t size = whole.bytes();
        const bool on_gpu = whole.gpu >= 0;
        return run(asked, {group_, Verb::all_gather, {made(part), made(whole), {}}, listed(output), size, true}, on_gpu);
    }

    nb::object reduce_scatter(nb::handle output, nb::handle input, nb::handle options) {
        CallOptions asked;
        FlatTensor whole, part;
        if (!reads(torch_.reduce_scatter, options, asked) || !look_both(output, part, input, whole)) return nb::none();
        if (whole.count != part.count * world_size_ || !is_reducible(whole, asked)) return nb::none();
        const std::size_t size = whole.bytes();
        const bool on_gpu = whole.gpu >= 0;
        return run(asked, {group_, Verb::reduce_scatter, {made(whole), asked.op, made(part)}, listed(output), size}, on_gpu);
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
        return run(asked, {group_, Verb::all_to_all, {made(source), made(target), {}}, listed(output), size}, on_gpu);
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
        return run(asked, {group_, Verb::all_gather, {made(part), made(whole, true), {}}, tensors, size, true});
    }

    nb::object reduce_scatter_list(nb::handle outputs, nb::handle inputs, nb::handle options) {
        CallOptions asked;
        FlatTensor part;
        TensorList whole;
        if (!reads(torch_.reduce_scatter, options, asked) || !look_one(outputs, part) || !is_reducible(part, asked) ||
            !look_list(only(inputs), part, whole))
            return nb::none();
        const std::size_t size = whole.bytes();
        return run(asked, {group_, Verb::reduce_scatter, {made(whole, false), asked.op, made(part)}, nb::borrow(outputs), size, true});
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
        return run(asked, {group_, Verb::gather, {made(part), asked.root, whole}, tensors, size, true});
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
        return run(asked, {group_, Verb::scatter, {whole, asked.root, made(part)}, nb::borrow(outputs), size});
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
        PreparedCall call{group_, Verb::all_to_all, {whole_or_list(sizes.sent), whole_or_list(sizes.received), {}}, tensors, size, true};
        call.ask_first(std::move(sizes));
        return run(asked, std::move(call));
    }

    nb::object barrier(nb::handle options) {
        CallOptions asked;
        if (!reads(torch_.barrier, options, asked)) return nb::none();
        return run(asked, {group_, Verb::barrier, {}, nb::list(), 0});
    }

    // The handle of a message; or of one that goes on, the message and what FastMessages says. A short one is sent at once. A long
    // one waits for its receiver, which the call must not, unless its caller does nothing else: it stands in line.
    nb::object send(nb::handle tensors, nb::handle dst, nb::handle tag) {
        FlatTensor flat;
        if (!is_open() || !is_peer(dst) || !is_tag(tag) || !look_one(tensors, flat) || flat.gpu >= 0) return nb::none();
        const bool is_idle = lines_[1]->idle(), is_waited_for = is_idle && torch_.is_waited_for(1);
        const bool is_short = flat.bytes() <= buffered_;
        PreparedMessage message(group_, flat, dst, tag, tensors, true);
        if (!is_short && !(is_waited_for && lines_[2]->idle())) return in_line(std::move(message));
        if (!is_idle) return nb::none();
        const nb::object answer = message.move();
        if (answer.ptr() == Py_True) return is_waited_for ? torch_.unnamed() : torch_.finished(tensors);
        if (answer.ptr() == Py_False) return is_short ? nb::none() : in_line(std::move(message));
        return nb::make_tuple(kept(std::move(message)), answer);
    }

    // The same. It stands in line, unless the caller waits for the message and does nothing else.
    nb::object recv(nb::handle tensors, nb::handle src, nb::handle tag) {
        FlatTensor flat;
        if (!is_open() || !is_peer(src) || !is_tag(tag) || !look_one(tensors, flat) || flat.gpu >= 0) return nb::none();
        PreparedMessage message(group_, flat, src, tag, tensors, false);
        if (lines_[2]->idle() && lines_[1]->idle() && torch_.is_waited_for(1)) {
            const nb::object answer = message.move();
            if (answer.ptr() == Py_True) return torch_.unnamed();
            if (answer.ptr() != Py_False) return nb::make_tuple(kept(std::move(message)), answer);
        }
        return in_line(std::move(message));
    }

private:
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

    // Of a message that does not move at once.
    nb::object in_line(PreparedMessage&& message) const {
        in_interpreter([&] { return group_.attr("_check")(); });
        const bool sends = message.sends;
        const TorchLine& line = *lines_[sends ? 1 : 2];
        nb::object handle = torch_.of_message(kept(std::move(message)));
        line.join(handle, false);
        return handle;
    }

    nb::object kept(PreparedMessage&& message) const {
        const bool sends = message.sends;
        message.wait_in(lines_[sends ? 1 : 2], lines_[sends ? 2 : 1]);
        return nb::cast(std::move(message));
    }

    static nb::object listed(nb::handle tensor) {
        nb::list one;
        one.append(tensor);
        return one;
    }

    // The handle of an operation that is done or stands in line, or None.
    nb::object run(const CallOptions& asked, PreparedCall&& call, bool on_gpu = false) const {
        if (asked.later) return on_gpu ? nb::none() : in_line(std::move(call));
        if (call.asks() ? !run_both(call) : !lines_[0]->idle() || call.on_fast_path().is_none()) return nb::none();
        if (call.is_counted) torch_.count_change(call.tensors);
        return torch_.is_waited_for(0) ? torch_.unnamed() : torch_.finished(call.tensors);
    }

    nb::object in_line(PreparedCall&& call) const {
        const bool at_once = call.size > short_;
        call.wait_in(lines_[0]);
        if (call.is_counted) torch_.count_change(call.tensors);
        nb::object handle = torch_.of_collective(nb::cast(std::move(call)));
        lines_[0]->join(handle, at_once);
        return handle;
    }

    // Two collectives, between which no other may come. False: declined.
    bool run_both(const PreparedCall& call) const {
        if (!lines_[0]->try_enter()) return false;
        bool done = false;
        try {
            done = !call.on_fast_path().is_none();
        } catch (...) {
            lines_[0]->leave();
            throw;
        }
        lines_[0]->leave();
        return done;
    }

    const TorchAccess& torch_;
    nb::object group_;
    const std::size_t buffered_, short_, slice_;
    std::vector<std::shared_ptr<TorchLine>> lines_;
    nb::object mean_ = nb::steal(PyUnicode_InternFromString("mean")),
               fast_path_ = nb::steal(PyUnicode_InternFromString("_fast_path"));
    int world_size_ = 0, rank_ = 0;
};

}  // namespace phalanx
