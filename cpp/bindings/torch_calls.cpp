// The fast calls of torch.distributed (torch_calls.hpp), for Python.

#include "torch_calls.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "module.hpp"

namespace nb = nanobind;
using namespace phalanx;

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
        .def(nb::init<const TensorReader&, const OptionsReader&, std::vector<nb::object>, const std::vector<std::uintptr_t>&,
                      const std::vector<nb::object>&, nb::object, nb::object, nb::object, std::vector<nb::object>>(),
             nb::arg("reader"), nb::arg("options"), nb::arg("watchers"), nb::arg("addresses"), nb::arg("handles"),
             nb::arg("begin_handle"), nb::arg("translated"), nb::arg("count_change"), nb::arg("waiting"), nb::keep_alive<1, 2>(),
             nb::keep_alive<1, 3>())
        .def_rw("all_reduce", &TorchAccess::all_reduce)
        .def_rw("broadcast", &TorchAccess::broadcast)
        .def_rw("reduce", &TorchAccess::reduce)
        .def_rw("all_gather", &TorchAccess::all_gather)
        .def_rw("reduce_scatter", &TorchAccess::reduce_scatter)
        .def_rw("all_to_all", &TorchAccess::all_to_all)
        .def_rw("gather", &TorchAccess::gather)
        .def_rw("scatter", &TorchAccess::scatter)
        .def_rw("barrier", &TorchAccess::barrier);
    nb::class_<LineTurn>(m, "LineTurn", "Whose turn it is to run an operation of a line: a lock, as Python's own.")
        .def(nb::init<>())
        .def("try_acquire", &LineTurn::try_acquire)
        .def("release", &LineTurn::release)
        .def("locked", &LineTurn::is_held)
        .def("__enter__", &LineTurn::enter)
        .def("__exit__", [](LineTurn& turn, const nb::args&) { turn.release(); });
    nb::class_<OperationQueue>(m, "OperationQueue", "The operations of a line, in the order in which they run.")
        .def(nb::init<>())
        .def_prop_rw("alarm", &OperationQueue::alarm, &OperationQueue::set_alarm, nb::for_setter(nb::arg("alarm").none()))
        .def_rw("is_away", &OperationQueue::is_away)
        .def("__len__", &OperationQueue::size)
        .def("first", &OperationQueue::first)
        .def("append", &OperationQueue::append, nb::arg("operation"))
        .def("remove", &OperationQueue::remove, nb::arg("operation"));
    nb::class_<OperationInLine>(m, "OperationInLine", "What the handle of an operation in line knows of it.")
        .def_prop_ro("ended", &OperationInLine::ended)
        .def_prop_ro("error", &OperationInLine::error)
        .def_prop_ro("is_open", &OperationInLine::is_open)
        .def_prop_ro("runner", &OperationInLine::runner)
        .def("open", &OperationInLine::open)
        .def("note_end", &OperationInLine::note_end, nb::arg("error").none());
    nb::class_<PreparedCall, OperationInLine>(m, "PreparedCall", "A collective that is ready to run.")
        .def_ro("tensors", &PreparedCall::tensors)
        .def("run", &PreparedCall::run, nb::arg("handle"));
    nb::class_<PreparedMessage, OperationInLine>(m, "PreparedMessage", "A message between two ranks that is ready to be moved.")
        .def_ro("group", &PreparedMessage::group)
        .def_ro("tensors", &PreparedMessage::tensors)
        .def_prop_ro("other_runner", &PreparedMessage::other_runner)
        .def_prop_ro("begun", &PreparedMessage::begun)
        .def("run", &PreparedMessage::run, nb::arg("handle"))
        .def_ro("memory", &PreparedMessage::memory)
        .def_ro("peer", &PreparedMessage::peer)
        .def_ro("tag", &PreparedMessage::tag)
        .def_ro("sends", &PreparedMessage::sends)
        .def_prop_ro("site", &PreparedMessage::site, nb::rv_policy::reference_internal);
    nb::class_<TorchCalls>(m, "TorchCalls", "The simple calls of a process group of torch; see phalanx.torch_backend.fast_calls.")
        .def(nb::init<const nb::object&, nb::object, const nb::list&, std::size_t, std::size_t, std::size_t>(), nb::arg("torch"),
             nb::arg("group"), nb::arg("lines"), nb::arg("buffered"), nb::arg("short_bytes"), nb::arg("slice_bytes"))
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
