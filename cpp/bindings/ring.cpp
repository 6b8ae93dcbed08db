// The rings of point-to-point channels for Python.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "buffer.hpp"
#include "fast_messages.hpp"
#include "gil.hpp"
#include "mapped_ring.hpp"
#include "module.hpp"
#include "stream_messages.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

constexpr std::size_t nonce_size = sizeof(RingControl::nonce);

const char* nonce_of(const nb::bytes& nonce) {
    if (nonce.size() != nonce_size) throw nb::value_error("a nonce has 16 bytes");
    return nonce.c_str();
}

template <class F>
void moving(std::size_t bytes, F move) {
    if (bytes < worth_releasing) return move();
    const WithoutGil released;
    move();
}

// As many bytes of the buffers as fit; 0 if none do, and then a byte will come on the socket once there is room.
std::size_t write_views(RingOut& out, nb::sequence views) {
    RingWriter* ring = out.half();
    if (ring == nullptr) return 0;
    const RingOut::Stay stay(out);
    std::size_t total = 0;
    for (nb::handle view : views) {
        const Buffer buffer(view, PyBUF_SIMPLE);
        std::size_t done = 0;
        while (done < buffer.bytes()) {
            std::size_t count = std::min(ring->room(buffer.bytes() - done), buffer.bytes() - done);
            if (count == 0 && total == 0) {
                ring->ask_for_byte();
                count = std::min(ring->room(buffer.bytes()), buffer.bytes());
                if (count != 0) ring->ask_for_no_byte();
            }
            if (count == 0) return total;
            moving(count, [&] { ring->put(buffer.data() + done, count); });
            done += count;
            total += count;
            ring->publish();
        }
    }
    return total;
}

// As many bytes as are there; 0 if none are, and then a byte will come on the socket with the next ones.
std::size_t read_into(RingIn& in, nb::handle view) {
    RingReader* ring = in.half();
    if (ring == nullptr) return 0;
    const RingIn::Stay stay(in);
    const Buffer buffer(view, PyBUF_WRITABLE);
    if (buffer.bytes() == 0) return 0;
    std::size_t count = std::min(ring->available(buffer.bytes()), buffer.bytes());
    if (count == 0) {
        ring->ask_for_byte();
        count = std::min(ring->available(buffer.bytes()), buffer.bytes());
        if (count == 0 && !MessageBorrower::stands(*ring)) return 0;
        ring->ask_for_no_byte();
    }
    if (count == 0) {
        std::size_t taken = 0;
        moving(buffer.bytes(), [&] { taken = in.loans.take(*ring, buffer.data(), buffer.bytes(), true); });
        return taken != 0 ? taken : read_into(in, view);  // it is over, and the rest comes through the ring
    }
    moving(count, [&] { ring->peek(buffer.data(), count); });
    ring->skip(count);
    ring->publish();
    return count;
}

template <class Ring>
auto bind_half(nb::module_& m, const char* name, const char* words) {
    return nb::class_<Ring>(m, name, words)
        .def("close", &Ring::close)
        .def("abandon", &Ring::abandon)
        .def("sever", &Ring::sever)
        .def("ask_ahead_from", [](Ring& r, std::size_t bytes) { if (r.half() != nullptr) r.half()->ahead_from = bytes; }, nb::arg("size"))
        .def_prop_ro("other_closed", [](Ring& r) { return r.half() != nullptr && r.half()->other_closed(); })
        .def_prop_ro("severed", [](Ring& r) { return r.half() == nullptr || r.half()->severed(); })
        .def_prop_ro("broken", [](Ring& r) { return r.half() != nullptr && r.half()->broken(); })
        .def_prop_ro("broken_counts", [](Ring& r) {
            const auto [read, written] = r.half() != nullptr ? r.half()->broken_counts() : std::pair<std::uint64_t, std::uint64_t>{};
            return nb::make_tuple(read, written);
        });
}

}  // namespace

void phalanx::bind_ring(nb::module_& m) {
    m.attr("RING_CONTROL_BYTES") = ring_control_bytes;
    nb::class_<SharedCrew>(m, "Crew", "Threads that help those who read what others lend; see cpp/phalanx/shared_crew.hpp.")
        .def(nb::init<int>(), nb::arg("helpers"))
        .def("dismiss", &SharedCrew::dismiss);
    bind_half<RingOut>(m, "RingOut", "The writing side of a ring; see cpp/phalanx/ring.hpp.")
        .def("__init__",
             [](RingOut* self, int memory, std::size_t size, int socket, const nb::bytes& nonce) {
                 const char* characters = nonce_of(nonce);
                 new (self) RingOut(memory, size, socket);
                 self->init(characters);
             },
             nb::arg("memory"), nb::arg("size"), nb::arg("socket"), nb::arg("nonce"))
        .def_prop_ro("accepted", &RingOut::accepted)
        .def_prop_rw("lends_from", [](RingOut& r) { return r.loans.lends_from; },
                     [](RingOut& r, std::size_t bytes) { r.loans.lends_from = bytes; })
        .def_prop_rw("exchanges_from", [](RingOut& r) { return r.loans.exchanges_from; },
                     [](RingOut& r, std::size_t bytes) { r.loans.exchanges_from = bytes; })
        .def_prop_ro("lent", [](RingOut& r) { return r.loans.lent; })
        .def("write", &write_views, nb::arg("views"));
    bind_half<RingIn>(m, "RingIn", "The reading side of a ring.")
        .def(nb::init<int, std::size_t, int>(), nb::arg("memory"), nb::arg("size"), nb::arg("socket"))
        .def("accept", [](RingIn& r, const nb::bytes& nonce) { return r.accept(nonce_of(nonce)); }, nb::arg("nonce"))
        .def_prop_ro("pending", [](RingIn& r) {
            return r.half() != nullptr && (r.half()->has_bytes() || MessageBorrower::stands(*r.half()));
        })
        .def("borrow_from", [](RingIn& r, int pid, SharedCrew* crew, int helpers) { r.loans.borrow_from(pid, crew, helpers); },
             nb::arg("pid"), nb::arg("crew").none(), nb::arg("helpers"), nb::keep_alive<1, 3>())
        .def_rw("resting", &RingIn::resting)
        .def("read_into", &read_into, nb::arg("view"));
    nb::class_<ChannelLock>(m, "ChannelLock", "A re-entrant lock that fast messages give way to.")
        .def(nb::init<>())
        .def("__enter__", &ChannelLock::enter)
        .def("acquire",
             [](ChannelLock& lock, bool blocking) {
                 if (blocking) lock.enter();
                 return blocking || lock.enter_or_ask();
             },
             nb::arg("blocking") = true)
        .def("release", &ChannelLock::exit)
        .def("__exit__", [](ChannelLock& lock, nb::args) { lock.exit(); });
    nb::class_<PlainArrays>(m, "PlainArrays", "Knows the arrays that the fast paths take.")
        .def(nb::init<nb::handle, nb::list, nb::list, nb::object, nb::object>(), nb::arg("array_type"), nb::arg("dtypes"),
             nb::arg("samples"), nb::arg("make_reader"), nb::arg("bfloat16"));
    nb::class_<PreparedChannelMessage>(m, "PreparedChannelMessage", "A message that its call does not wait for; see phalanx.group.verbs.prepared.")
        .def("begin", &PreparedChannelMessage::begin)
        .def("run", &PreparedChannelMessage::run)
        .def("stop", &PreparedChannelMessage::stop)
        .def("hand_over", &PreparedChannelMessage::hand_over, nb::arg("sink").none() = nb::none())
        .def("leave", &PreparedChannelMessage::leave)
        .def_prop_ro("ended", &PreparedChannelMessage::ended)
        .def_prop_ro("array", &PreparedChannelMessage::array)
        .def_prop_ro("peer", &PreparedChannelMessage::peer)
        .def_prop_ro("tag", &PreparedChannelMessage::tag)
        .def_prop_ro("bytes", &PreparedChannelMessage::bytes)
        .def_prop_ro("began", &PreparedChannelMessage::began)
        .def_prop_ro("seconds", &PreparedChannelMessage::seconds)
        .def_prop_ro("site", &PreparedChannelMessage::site, nb::rv_policy::copy);
    nb::class_<FastMessages>(m, "FastMessages", "Sends and receives simple arrays through rings, in one call each.")
        .def(nb::init<int, nb::object, nb::object, nb::object, double, std::size_t, int, int>(), nb::arg("peers"),
             nb::arg("mailbox"), nb::arg("arrays"), nb::arg("recorder"), nb::arg("timeout"), nb::arg("max_message"),
             nb::arg("spins"), nb::arg("yields"))
        .def("open_out", &FastMessages::open_out, nb::arg("dst"), nb::arg("ring"), nb::arg("channel"), nb::arg("queue"))
        .def("open_in", &FastMessages::open_in, nb::arg("src"), nb::arg("ring"), nb::arg("channel"))
        .def("attend_by", &FastMessages::attend_by, nb::arg("alarm"), nb::arg("start"))
        .def("close", &FastMessages::close)
        .def("post_send", &FastMessages::post_send, nb::arg("x").none(), nb::arg("dst").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none())
        .def("prepare_receive", &FastMessages::prepare_receive, nb::arg("out").none(), nb::arg("src").none(), nb::arg("tag").none(),
             nb::arg("timeout").none())
        .def("exchange", &FastMessages::exchange, nb::arg("x").none(), nb::arg("dst").none(), nb::arg("out").none(),
             nb::arg("src").none(), nb::arg("tag").none(), nb::arg("timeout").none())
        .def("send", &FastMessages::send, nb::arg("x").none(), nb::arg("dst").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none(), nb::arg("library") = "numpy")
        .def("recv", &FastMessages::recv, nb::arg("out").none(), nb::arg("src").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none(), nb::arg("library") = "numpy")
        .def("next_array", &FastMessages::next_array, nb::arg("src").none(), nb::arg("tag").none(), nb::arg("timeout").none())
        .def("send_object", &FastMessages::send_object, nb::arg("head"), nb::arg("dst").none(), nb::arg("tag").none(),
             nb::arg("timeout").none())
        .def("next_object", &FastMessages::next_object, nb::arg("src").none(), nb::arg("tag").none(), nb::arg("timeout").none())
        .def("take_object", &FastMessages::take_object, nb::arg("src").none(), nb::arg("tag").none(), nb::arg("size"),
             nb::arg("place"));
    nb::class_<StreamMessages>(m, "StreamMessages", "The same over TCP.")
        .def(nb::init<int, nb::object, nb::object, nb::object, double, std::size_t, bool>(), nb::arg("peers"),
             nb::arg("mailbox"), nb::arg("arrays"), nb::arg("recorder"), nb::arg("timeout"), nb::arg("max_message"),
             nb::arg("oversubscribed"))
        .def("open_out", &StreamMessages::open_out, nb::arg("dst"), nb::arg("channel"), nb::arg("queue"))
        .def("open_in", &StreamMessages::open_in, nb::arg("src"), nb::arg("channel"))
        .def("attend_by", &StreamMessages::attend_by, nb::arg("alarm"), nb::arg("start"))
        .def("close", &StreamMessages::close)
        .def("post_send", &StreamMessages::post_send, nb::arg("x").none(), nb::arg("dst").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none())
        .def("prepare_receive", &StreamMessages::prepare_receive, nb::arg("out").none(), nb::arg("src").none(),
             nb::arg("tag").none(), nb::arg("timeout").none())
        .def("exchange", &StreamMessages::exchange, nb::arg("x").none(), nb::arg("dst").none(), nb::arg("out").none(),
             nb::arg("src").none(), nb::arg("tag").none(), nb::arg("timeout").none())
        .def("send", &StreamMessages::send, nb::arg("x").none(), nb::arg("dst").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none(), nb::arg("library") = "numpy")
        .def("recv", &StreamMessages::recv, nb::arg("out").none(), nb::arg("src").none(), nb::arg("tag").none(),
             nb::arg("timeout") = nb::none(), nb::arg("library") = "numpy");
}
