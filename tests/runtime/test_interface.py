"""The C interface of the device, from programs without PyTorch: openreg_ops/include and libopenreg_ops.so."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import openreg_ops

HERE = Path(__file__).parent
HEADERS = Path(openreg_ops.include_paths()[0]) / "openreg"
LIBRARY = openreg_ops.library_paths()[0]
LINKED = [f"-L{LIBRARY}", "-lopenreg_ops", f"-Wl,-rpath,{LIBRARY}"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
OLDEST = HERE / "c_api_1_0.h"


def compiled(program, *command):
    built = subprocess.run([*command, "-o", program], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return program


def environment(**variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENREG_")}
    return {**kept, "OPENREG_DEVICE_COUNT": "2", "OPENREG_DEVICE_MEMORY": "2GiB", **variables}


def output(program, *arguments, **variables):
    ran = subprocess.run([program, *arguments], capture_output=True, text=True, env=environment(**variables))
    assert not ran.stderr and ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.strip()


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder, include = tmp_path_factory.mktemp("programs"), f"-I{HEADERS.parent}"
    c, cpp = ["gcc", "-std=c11", *WARNINGS, HERE / "client.c"], ["g++", "-std=c++20", *WARNINGS, HERE / "client.cpp"]
    return {
        "c": compiled(folder / "c", *c, include, *LINKED),
        "built with 1.0": compiled(folder / "old", *c, f'-DHEADER="{OLDEST}"', *LINKED),
        "c++": compiled(folder / "cpp", *cpp, include, "-DOPENREG_LINKED", *LINKED),
        "not linked": compiled(folder / "apart", *cpp, include),
    }


@pytest.mark.compiles
@pytest.mark.parametrize("isolation", ["off", "auto"])
@pytest.mark.parametrize("mode", ["inline", "async", "sync"])
@pytest.mark.parametrize("program", ["c", "built with 1.0", "c++"])
def test_programs(programs, program, mode, isolation):
    variables = {"OPENREG_LAUNCH_MODE": mode, "OPENREG_ISOLATION": isolation}
    if program == "c++" and isolation != "off":
        variables["OPENREG_ISOLATION"] = "strict"  # which a program that looks at no device memory by itself passes
    assert output(programs[program], mode, **variables) == "all right"


@pytest.mark.compiles
def test_without_the_device(programs):
    ran = subprocess.run([programs["not linked"]], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr == (
        "openreg: this process has no such device; `import torch` with openreg_ops installed, or define OPENREG_LINKED "
        "and link with libopenreg_ops.so (openreg_ops.library_paths())\n"
    )


@pytest.mark.compiles
@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
@pytest.mark.parametrize(
    ("wanted", "found"), [("", True), ("1.0", True), ("1.99", False), ("2.0", False), ("0.9", False)]
)
def test_cmake(tmp_path, wanted, found):
    (tmp_path / "CMakeLists.txt").write_text(f"""
cmake_minimum_required(VERSION 3.18)
project(client C CXX)
find_package(openreg {wanted} REQUIRED)
add_executable(client "{HERE}/client.cpp")
target_link_libraries(client openreg::openreg)
add_library(kernels MODULE "{HERE}/client.cpp")
target_link_libraries(kernels openreg::headers)
""")
    prefix = f"-DCMAKE_PREFIX_PATH={openreg_ops.cmake_prefix_path}"
    asked = subprocess.run(["cmake", "-B", "build", prefix], cwd=tmp_path, capture_output=True, text=True)
    assert (asked.returncode == 0) == found, asked.stderr
    if not wanted:
        built = subprocess.run(["cmake", "--build", "build"], cwd=tmp_path, capture_output=True, text=True)
        assert built.returncode == 0, built.stdout + built.stderr
        assert output(tmp_path / "build/client") == "all right"
        assert (
            "openreg_ops"
            not in subprocess.run(["ldd", tmp_path / "build/libkernels.so"], capture_output=True, text=True).stdout
        )


def members(header):
    """The table's functions, in order, each as it is declared, and the structs."""
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S)
    table = re.search(r"typedef struct openreg_interface \{(.*?)\} openreg_interface;", text, flags=re.S)[1]
    structs = re.findall(r"typedef struct openreg_(?!interface)\w+ \{.*?\} \w+;", text, flags=re.S)
    return [" ".join(each.split()) for each in table.split(";")[:-1]], [" ".join(struct.split()) for struct in structs]


def test_later_versions_only_add():
    """What was built with the oldest header of the series finds all that it knows at its place."""
    (old, old_structs), (new, new_structs) = members(OLDEST), members(HEADERS / "c_api.h")
    assert len(old) > 20 and len(old_structs) == 3
    assert new[: len(old)] == old and new_structs == old_structs
    minor = int(re.search(r"OPENREG_MINOR (\d+)", (HEADERS / "c_api.h").read_text())[1])
    assert (minor > 0) == (len(new) > len(old)), "a table that has grown has a new minor version"


@pytest.mark.parametrize("header", ["c_api.h", "launch.h", "openreg.h"])
def test_headers_need_no_torch(header):
    for included in re.findall(r"#include (.*)", (HEADERS / header).read_text()):
        assert re.fullmatch(r'<\w+(\.h)?>|"(c_api|launch)\.h"', included), included
