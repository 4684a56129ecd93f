# SPDX-License-Identifier: Apache-2.0
# conan create packaging/conan ; for CPUs, or with -o "&:cuda=True" where CMake finds a CUDA compiler.
import pathlib
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, rmdir

SOURCES = ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "src/*")


class Libkda(ConanFile):
    name = "libkda"
    license = "Apache-2.0"
    description = "Kimi Delta Attention kernels for CPUs and NVIDIA GPUs"
    topics = ("linear-attention", "cuda", "machine-learning")
    settings = "os", "arch", "compiler", "build_type"
    options = {"cuda": [True, False]}
    default_options = {"cuda": False}

    def set_version(self):
        header = pathlib.Path(self.recipe_folder, "../../include/kda/version.h").read_text()
        self.version = re.search(r'KDA_VERSION_STRING "([0-9.]+)"', header)[1]

    def export_sources(self):
        for pattern in SOURCES:
            copy(self, pattern, str(pathlib.Path(self.recipe_folder, "../..").resolve()), self.export_sources_folder)

    def validate(self):
        check_min_cppstd(self, 20)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        for option in ("TOOLS", "TESTS", "BENCH"):
            toolchain.cache_variables[f"KDA_BUILD_{option}"] = False
        toolchain.cache_variables["KDA_CUDA"] = "ON" if self.options.cuda else "OFF"
        toolchain.cache_variables["FETCHCONTENT_FULLY_DISCONNECTED"] = True
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        copy(self, "LICENSE", self.source_folder, self.package_folder + "/licenses")
        CMake(self).install()
        rmdir(self, self.package_folder + "/lib/cmake")
        rmdir(self, self.package_folder + "/lib/pkgconfig")

    def package_info(self):
        self.cpp_info.set_property("cmake_file_name", "kda")
        for name in ("kda", "kda_c"):
            part = self.cpp_info.components[name]
            part.libs = [name]
            part.set_property("cmake_target_name", f"kda::{name}")
            part.set_property("pkg_config_name", name)
        self.cpp_info.components["kda"].system_libs = ["stdc++", "m", "pthread"]
