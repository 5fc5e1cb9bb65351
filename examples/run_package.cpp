// Runs a model compiled by AOTInductor from C++; examples/run_package.py builds this, and creates a model if you do not
// pass one. The device is in the Python package, so the program embeds an interpreter and imports the package once.
#include <Python.h>

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: run_package PACKAGE.pt2 (a model of one input; it gets ones of shape [5, 16] on openreg:0)\n";
    return 2;
  }
  Py_InitializeEx(/*initsigs=*/0);
  if (PyRun_SimpleString("import torch, openreg_ops") != 0) return 1;
  PyThreadState* const python = PyEval_SaveThread(); // from here on no Python runs
  {
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    const at::Tensor x = at::ones({5, 16}, at::Device("openreg:0"));
    for (const at::Tensor& result : model.run({x})) std::cout << result.device() << " " << result.cpu() << "\n";
  }
  PyEval_RestoreThread(python);
  return Py_FinalizeEx();
}
