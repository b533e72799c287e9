// The library _cuda: the kernels behind the operators that _C declares. Importing it registers them; the module itself
// is empty.
#include <Python.h>

PyMODINIT_FUNC PyInit__cuda() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
