// The connection that ends when this process begins to die, for Python; see cpp/phalanx/lifeline.hpp.

#include "phalanx/lifeline.hpp"

#include <nanobind/nanobind.h>

#include <cerrno>
#include <system_error>

#include "gil.hpp"
#include "module.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace phalanx;

void phalanx::bind_lifeline(nb::module_& m) {
    nb::class_<Lifeline>(m, "Lifeline", "A connection that ends at the moment this process begins to die.")
        .def("__init__",
             [](Lifeline* self, int fd) {
                 try {
                     new (self) Lifeline(fd);
                 } catch (const std::system_error& error) {
                     errno = error.code().value();
                     PyErr_SetFromErrno(PyExc_OSError);
                     throw nb::python_error();
                 }
             },
             "fd"_a)
        .def("let_go", [](Lifeline& self) {
            const WithoutGil released;
            self.let_go();
        });
}
