// Messages through MPI, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "module.hpp"
#include "mpi_messages.hpp"
#include "mpi_prepared.hpp"
#include "mpi_unattended.hpp"
#include "mpi_wire.hpp"

namespace nb = nanobind;
using namespace phalanx;

void phalanx::bind_mpi_messages(nb::module_& m) {
    nb::class_<MpiWire>(m, "MpiWire", "MPI's functions for messages, by their addresses.")
        .def(nb::init<const std::vector<MpiWire::Word>&, MpiWire::Word, MpiWire::Word, MpiWire::Word, int, int>(),
             nb::arg("functions"), nb::arg("heads"), nb::arg("bodies"), nb::arg("byte"), nb::arg("anyone"), nb::arg("highest_tag"));
    nb::class_<MpiRequest>(m, "MpiRequest", "What MPI has not finished yet.")
        .def("Test", &MpiRequest::test)
        .def("Cancel", &MpiRequest::cancel);
    nb::class_<UnattendedMessages>(m, "UnattendedMessages", "The prepared messages of a world that no thread waits for.")
        .def(nb::init<nb::object, nb::list, nb::object>(), nb::arg("alarm"), nb::arg("jobs"), nb::arg("start"))
        .def_prop_ro("count", &UnattendedMessages::count);
    nb::class_<MpiMessages>(m, "MpiMessages", "Sends and receives arrays through MPI, in one call each.")
        .def(nb::init<const MpiWire&, const nb::bytes&, int, const std::vector<int>&, nb::object, nb::object, nb::object, nb::object,
                      nb::object, double, std::size_t, std::size_t, bool, nb::object, nb::object, nb::object>(),
             nb::arg("wire"), nb::arg("begins"), nb::arg("rank"), nb::arg("members"), nb::arg("inbox"), nb::arg("reader"),
             nb::arg("lock"), nb::arg("arrays"), nb::arg("recorder"), nb::arg("timeout"), nb::arg("whole"), nb::arg("most"),
             nb::arg("oversubscribed"), nb::arg("general"), nb::arg("numbers"), nb::arg("unattended"))
        .def("close", &MpiMessages::close)
        .def("send", &MpiMessages::send, nb::arg("x").none(), nb::arg("dst").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none(), nb::arg("library") = "numpy")
        .def("post_send", &MpiMessages::post_send, nb::arg("x").none(), nb::arg("dst").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none())
        .def("recv", &MpiMessages::recv, nb::arg("out").none(), nb::arg("src").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none(), nb::arg("library") = "numpy")
        .def("prepare_receive", &MpiMessages::prepare_receive, nb::arg("out").none(), nb::arg("src").none(), nb::arg("tag").none(),
             nb::arg("timeout").none())
        .def("prepare_send", &MpiMessages::prepare_send, nb::arg("x").none(), nb::arg("dst").none(), nb::arg("tag").none(),
             nb::arg("timeout").none());
    nb::class_<MpiMessages::Prepared>(m, "PreparedMpiMessage", "A message that its call does not wait for; see phalanx.group.verbs.prepared.")
        .def("begin", &MpiMessages::Prepared::begin)
        .def("run", &MpiMessages::Prepared::run)
        .def("exchange", &MpiMessages::Prepared::exchange, nb::arg("receiving"))
        .def("hand_over", &MpiMessages::Prepared::hand_over, nb::arg("sink") = nb::none())
        .def("leave", &MpiMessages::Prepared::leave)
        .def("stop", &MpiMessages::Prepared::stop)
        .def("overlaps", &MpiMessages::Prepared::overlaps, nb::arg("other"))
        .def_prop_ro("ended", &MpiMessages::Prepared::ended)
        .def_prop_ro("operation", &MpiMessages::Prepared::operation)
        .def_prop_ro("peer", &MpiMessages::Prepared::peer)
        .def_prop_ro("tag", &MpiMessages::Prepared::tag)
        .def_prop_ro("bytes", &MpiMessages::Prepared::bytes)
        .def_prop_ro("began", &MpiMessages::Prepared::began)
        .def_prop_ro("seconds", &MpiMessages::Prepared::seconds)
        .def_prop_ro("site", &MpiMessages::Prepared::site, nb::rv_policy::copy);
}
