// The work of messages that stand in line, made without a frame of Python. src/phalanx/group/verbs/prepared.py has its classes.
#pragma once

#include <nanobind/nanobind.h>

namespace phalanx {

// The work, of that class, of a message that the fast path has prepared. From now on the message stands in line. Not valid in a
// forked child, where a channel may not have ended yet that a thread of the parent was using.
nanobind::object stand_in_line(nanobind::handle type, nanobind::handle group, nanobind::handle prepared, nanobind::handle result);

}  // namespace phalanx
