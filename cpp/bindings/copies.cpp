// Copies of a program's state, for `phalanx.elastic`: many small arrays, after every step.

#include <nanobind/nanobind.h>

#include <cstring>
#include <memory>
#include <vector>

#include "buffer.hpp"
#include "gil.hpp"
#include "module.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace phalanx;

namespace {

// Pairs of arrays as long as each other, whose memory is held in place.
class Copies {
public:
    Copies(const nb::list& targets, const nb::list& sources) {
        if (targets.size() != sources.size()) throw nb::value_error("each source needs a target");
        for (std::size_t i = 0; i < targets.size(); ++i) {
            Pair pair{std::make_unique<Buffer>(nb::handle(targets[i]), PyBUF_WRITABLE),
                      std::make_unique<Buffer>(nb::handle(sources[i]), PyBUF_SIMPLE)};
            if (pair.target->bytes() != pair.source->bytes()) throw nb::value_error("a source and its target differ in length");
            bytes_ += pair.source->bytes();
            pairs_.push_back(std::move(pair));
        }
    }

    Copies(const Copies&) = delete;
    Copies& operator=(const Copies&) = delete;

    void take() const {
        if (bytes_ < worth_letting_go) return copy();
        const WithoutGil released;
        copy();
    }

private:
    // Bytes from which other threads of Python may run meanwhile.
    static constexpr std::size_t worth_letting_go = 1 << 20;

    struct Pair {
        std::unique_ptr<Buffer> target, source;
    };

    void copy() const noexcept {
        for (const Pair& pair : pairs_) std::memcpy(pair.target->data(), pair.source->data(), pair.source->bytes());
    }

    std::vector<Pair> pairs_;
    std::size_t bytes_ = 0;
};

// Whether the values of dicts, one after another, are these very objects.
bool hold(const nb::list& dicts, const nb::list& objects) {
    std::size_t at = 0;
    for (nb::handle each : dicts) {
        if (!PyDict_Check(each.ptr())) return false;
        Py_ssize_t position = 0;
        PyObject* value = nullptr;
        while (PyDict_Next(each.ptr(), &position, nullptr, &value) != 0) {
            if (at == objects.size() || nb::handle(objects[at]).ptr() != value) return false;
            ++at;
        }
    }
    return at == objects.size();
}

}  // namespace

void phalanx::bind_copies(nb::module_& m) {
    nb::class_<Copies>(m, "Copies", "Copies of many arrays at once.")
        .def(nb::init<const nb::list&, const nb::list&>(), "targets"_a, "sources"_a)
        .def("take", &Copies::take, "Copies all of them as they are now.");
    m.def("hold", &hold, "dicts"_a, "objects"_a, "Whether the values of dicts, one after another, are these very objects.");
}
