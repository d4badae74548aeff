# docker build -t fox .                                   on the CPU
# docker build -t fox:cuda --build-arg RUNTIME=nvidia/cuda:13.0.2-runtime-ubuntu24.04 .   also on NVIDIA GPUs
# docker run --rm -p 8080:8080 fox serve --host 0.0.0.0   the pretrained model and its page
#
# NVIDIA's libraries (NVRTC, cuBLASLt) come with the runtime image, the driver from the host (--gpus all).
ARG RUNTIME=debian:bookworm-slim

FROM rust:1-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked -p fox && strip target/release/fox

FROM ${RUNTIME}
COPY --from=build /src/target/release/fox /usr/local/bin/fox
COPY --from=build /src/models /usr/local/share/fox/models
COPY --from=build /src/LICENSE-MIT /src/LICENSE-APACHE /src/THIRD-PARTY.md /usr/local/share/doc/fox/
WORKDIR /work
EXPOSE 8080
ENTRYPOINT ["fox"]
CMD ["--help"]
