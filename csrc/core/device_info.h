// What plans and launchers ask of a device, read once. Plain C++, so that a plan for any card can be made without one.
#pragma once

#include <cstdint>

namespace attention_ext {

struct DeviceInfo {
  int64_t capability = 0;  // 10 * major + minor: 90 for an H100
  int64_t sms = 1;         // streaming multiprocessors
};

// Of a device by its number, and of the current one. The defaults where the runtime has no such device: a launch then says why.
DeviceInfo device_info(int device);
DeviceInfo current_device_info();

}  // namespace attention_ext
