// Tells connections inside one machine from those between two.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>

namespace phalanx {

// Whether both ends of a connection have the same address.
inline bool joins_one_machine(int socket) noexcept {
    sockaddr_storage here{}, there{};
    socklen_t size = sizeof here, other = sizeof there;
    if (::getsockname(socket, reinterpret_cast<sockaddr*>(&here), &size) != 0) return false;
    if (::getpeername(socket, reinterpret_cast<sockaddr*>(&there), &other) != 0 || here.ss_family != there.ss_family)
        return false;
    if (here.ss_family == AF_INET)
        return reinterpret_cast<sockaddr_in&>(here).sin_addr.s_addr == reinterpret_cast<sockaddr_in&>(there).sin_addr.s_addr;
    return here.ss_family == AF_INET6 && std::memcmp(&reinterpret_cast<sockaddr_in6&>(here).sin6_addr,
                                                     &reinterpret_cast<sockaddr_in6&>(there).sin6_addr, sizeof(in6_addr)) == 0;
}

}  // namespace phalanx
