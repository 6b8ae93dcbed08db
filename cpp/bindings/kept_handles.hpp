// Handles of torch that nobody holds any more, kept to be given out again. Behind each, pybind11 makes an object of C++, registers
// it, and lets go of the GIL to destroy it, which together takes longer than a short collective.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace phalanx {

namespace nb = nanobind;

// One class of handles. With the GIL held only.
class KeptHandles {
public:
    // Makes the class that handles derive from, in the place of torch's. `count_place`: where an object of torch has the number of
    // its owners in C++ (phalanx.torch_backend.kept_handles).
    static nb::object make_base(nb::handle work, int count_place) {
        Common& common = shared();
        common.destroy = reinterpret_cast<destructor>(PyType_GetSlot(reinterpret_cast<PyTypeObject*>(work.ptr()), Py_tp_dealloc));
        common.count_place = count_place;
        PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(keep_or_destroy)}, {0, nullptr}};
        PyType_Spec spec{"phalanx._core.KeptWork", 0, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
        nb::object made = nb::steal(PyType_FromSpecWithBases(&spec, nb::make_tuple(work).ptr()));
        if (!made.is_valid()) throw nb::python_error();
        common.base = made;
        return made;
    }

    // Those of one class, for as long as the process lives; null if it does not derive from the base.
    static KeptHandles* of(nb::handle type) {
        Common& common = shared();
        const bool derives = common.base.is_valid() && PyObject_IsSubclass(type.ptr(), common.base.ptr()) == 1;
        if (!derives || (PyType_GetFlags(reinterpret_cast<PyTypeObject*>(type.ptr())) & Py_TPFLAGS_HAVE_GC) == 0) return nullptr;
        for (const auto& one : common.kinds)
            if (one->type_.ptr() == type.ptr()) return one.get();
        common.kinds.push_back(std::unique_ptr<KeptHandles>(new KeptHandles(nb::borrow(type))));
        return common.kinds.back().get();
    }

    // One that is as new, its fields unset; not valid if there is none.
    nb::object take() {
        if (kept_.empty()) return {};
        PyObject* const handle = kept_.back();
        kept_.pop_back();
        PyObject_Init(handle, reinterpret_cast<PyTypeObject*>(type_.ptr()));
        PyObject_GC_Track(handle);
        return nb::steal(handle);
    }

    // Tells of one that was just made, and that has no owner in C++ beside itself.
    void learn(nb::handle handle) noexcept { alone_ = owners_of(handle.ptr()); }

private:
    static constexpr std::size_t most = 64;

    struct Common {
        nb::object base;
        destructor destroy = nullptr;
        int count_place = -1;
        std::vector<std::unique_ptr<KeptHandles>> kinds;
    };
    static Common& shared() {
        static auto* const common = new Common;  // outlives the interpreter
        return *common;
    }

    explicit KeptHandles(nb::object type) : type_(std::move(type)) { kept_.reserve(most); }

    // 0 if there is no object of C++ behind it.
    static std::uint64_t owners_of(PyObject* handle) noexcept {
        const std::byte* object = nullptr;
        std::memcpy(&object, reinterpret_cast<std::byte*>(handle) + sizeof(PyObject), sizeof object);
        std::uint64_t owners = 0;
        if (object != nullptr) std::memcpy(&owners, object + shared().count_place, sizeof owners);
        return owners;
    }

    // The last step of destroying a handle, whose fields are unset by now. One that C++ still owns is not kept: that owner would
    // see the operation that it is given out for next.
    static void keep_or_destroy(PyObject* handle) {
        PyTypeObject* const type = Py_TYPE(handle);
        for (const auto& kind : shared().kinds) {
            if (kind->type_.ptr() != reinterpret_cast<PyObject*>(type)) continue;
            const std::uint64_t owners = owners_of(handle);
            if (owners == 0 || owners != kind->alone_) break;
            PyObject_ClearWeakRefs(handle);  // may run Python
            if (kind->kept_.size() == most) break;
            kind->kept_.push_back(handle);
            Py_DECREF(type);
            return;
        }
        shared().destroy(handle);
    }

    nb::object type_;
    std::vector<PyObject*> kept_;  // without a reference
    std::uint64_t alone_ = 0;
};

}  // namespace phalanx
