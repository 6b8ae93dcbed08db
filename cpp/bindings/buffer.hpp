// Contiguous memory of a Python object, held in place until the end of the scope.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

namespace phalanx {

class Buffer {
public:
    Buffer(nanobind::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nanobind::python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    std::byte* data() const noexcept { return static_cast<std::byte*>(view_.buf); }
    std::size_t bytes() const noexcept { return static_cast<std::size_t>(view_.len); }

private:
    Py_buffer view_{};
};

}  // namespace phalanx
