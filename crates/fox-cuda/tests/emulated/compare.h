// Results against f64, within TOLERANCE; the program defines it and FLOOR.
#pragma once

// Norm of the difference over the norm of what is wanted, or over that of a vector of `floor`s.
template <class T>
static void compare(const char* what, const std::vector<T>& got, const std::vector<double>& want, double floor = FLOOR) {
    double difference = 0.0, norm = floor * floor * want.size();
    for (size_t i = 0; i < want.size(); ++i) {
        const double x = sizeof(T) == 2 ? bf16_to_float(u16(got[i])) : double(got[i]);
        difference += (x - want[i]) * (x - want[i]), norm += want[i] * want[i];
    }
    const double error = sqrt(difference / norm);
    if (!(error <= TOLERANCE)) printf("%s is off by %g\n", what, error), exit(1);
}
