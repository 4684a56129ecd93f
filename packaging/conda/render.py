#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Renders recipe.yaml for CPUs and with CUDA, as rattler-build does before a build (py-rattler-build)."""
import pathlib

from rattler_build import Stage0Recipe, VariantConfig

RECIPE = pathlib.Path(__file__).with_name("recipe.yaml")
VARIANTS = """
cxx_compiler: [gxx]
c_stdlib: [sysroot]
c_stdlib_version: ["2.28"]
cuda_compiler: [cuda-nvcc]
cuda_compiler_version: ["{cuda}"]
python: ["3.12"]
"""

for cuda in ("None", "13.0"):
    recipe = Stage0Recipe.from_file(str(RECIPE))
    rendered = recipe.render(VariantConfig.from_yaml(VARIANTS.format(cuda=cuda)))
    names = [variant.recipe.package.name for variant in rendered]
    assert sorted(names) == ["libkda", "python-libkda"], names
    library = next(variant.recipe for variant in rendered if variant.recipe.package.name == "libkda")
    script = str(library.to_dict()["build"])
    assert f"export KDA_CUDA={'OFF' if cuda == 'None' else 'ON'}" in script, script
    print(f"recipe.yaml, CUDA {cuda}: {', '.join(names)}")
