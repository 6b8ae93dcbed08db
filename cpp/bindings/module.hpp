// What each file of this folder adds to phalanx._core.
#pragma once

#include <nanobind/nanobind.h>

namespace phalanx {

void bind_copies(nanobind::module_& m);
void bind_device(nanobind::module_& m);
void bind_fast_path(nanobind::module_& m);
void bind_frame_pipe(nanobind::module_& m);
void bind_lifeline(nanobind::module_& m);
void bind_machine(nanobind::module_& m);
void bind_mpi_messages(nanobind::module_& m);
void bind_packing(nanobind::module_& m);
void bind_posted_work(nanobind::module_& m);
void bind_reduce(nanobind::module_& m);
void bind_call_site(nanobind::module_& m);
void bind_recorder(nanobind::module_& m);
void bind_segment(nanobind::module_& m);
void bind_ring(nanobind::module_& m);
void bind_steps(nanobind::module_& m);
void bind_fast_steps(nanobind::module_& m);
void bind_torch_calls(nanobind::module_& m);
void bind_torch_methods(nanobind::module_& m);
void bind_verb_methods(nanobind::module_& m);

}  // namespace phalanx
