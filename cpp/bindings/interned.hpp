// Names as the interpreter keeps them: looked up by their address, where others are compared letter by letter.
#pragma once

#include <nanobind/nanobind.h>

namespace phalanx {

inline nanobind::str interned(const char* text) { return nanobind::steal<nanobind::str>(PyUnicode_InternFromString(text)); }

}  // namespace phalanx
