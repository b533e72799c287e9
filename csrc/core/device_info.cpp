#include "core/device_info.h"

#include <cuda_runtime_api.h>

#include <vector>

namespace attention_ext {

DeviceInfo device_info(int device) {
  static const std::vector<DeviceInfo> devices = [] {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
    std::vector<DeviceInfo> found(count);
    for (int i = 0; i < count; ++i) {
      int major = 0, minor = 0, sms = 1;
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i);
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, i);
      cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, i);
      found[i] = {10 * major + minor, sms};
    }
    return found;
  }();
  return device >= 0 && device < static_cast<int>(devices.size()) ? devices[device] : DeviceInfo{};
}

DeviceInfo current_device_info() {
  int device = -1;
  return cudaGetDevice(&device) == cudaSuccess ? device_info(device) : DeviceInfo{};
}

}  // namespace attention_ext
